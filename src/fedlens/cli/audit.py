"""`fedlens audit`: whether the differential privacy that an experiment claims can be refuted from outside."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlens.cli.display.output import print_columns, reported, say, stdout_kept_clean
from fedlens.cli.options import Changes, DataDir, Debug, Download, Json
from fedlens.cli.privacy import private_experiment

_RUNS = 1000


def audit(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    changes: Changes = None,
    runs: Annotated[
        int | None,
        typer.Option(
            min=100, help=f"Runs with one canary, of which a tenth chooses the threshold; default {_RUNS:,}."
        ),
    ] = None,
    one_run: Annotated[
        bool, typer.Option("--one-run", help="One run, in which all clients are canaries.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the claimed curve and the measured rates: .png, .pdf or .svg."
        ),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Look for a violation of the differential privacy that an experiment claims, from outside.

    Clients with known updates of norm C take part by coin, or not, and their traces in the released sums are guessed.
    The selection, clip, sum and noise are those of the experiment; no model is trained. Take a toy: all rounds are run
    in each run. Exit code 1 if a violation is found. That none is found proves nothing.
    """
    with reported(debug, as_json) as output:
        with stdout_kept_clean(as_json):
            found = _found(recipe, changes or (), runs, one_run, picture, data_dir, download)
        if as_json:
            output.json(found)
        else:
            _show(found)
        if found["violation"]:
            raise typer.Exit(1)


def _found(
    recipe: str,
    changes: Any,
    runs: int | None,
    one_run: bool,
    picture: Path | None,
    data_dir: Any,
    download: bool,
) -> dict[str, Any]:
    from fedlens.analyses.privacy_audit import audit_chart, audit_one_run, audit_runs, verdict
    from fedlens.base.errors import ConfigError
    from fedlens.privacy.guarantee import guarantee
    from fedlens.results.figures.picture import check_suffix, draw_chart

    if one_run and (runs is not None or picture is not None):
        other = "--runs" if runs is not None else "--picture"
        raise ConfigError(f"--one-run and {other} exclude each other", where=other, hint="remove one of them")
    if picture is not None:
        check_suffix(picture)
    built, settings = private_experiment(recipe, changes, data_dir, download)
    if (release := built.algorithm.release) is None:
        raise ConfigError(
            "the canaries of an audit are whole clients, and the unit is an example",
            where="privacy.unit",
            hint="set it to 'client'",
        )
    found = (
        audit_one_run(built) if one_run else audit_runs(built, runs or _RUNS, partial(typer.echo, err=True))
    )
    claim = guarantee(settings, [release] * built.config.rounds, built.config.record.unsafe)
    if picture is not None:
        draw_chart(audit_chart(found), picture)
    claimed = f"epsilon = {claim['epsilon']:.3g} at delta = {settings.delta:g}"
    return {
        **found,
        **{name: claim[name] for name in ("epsilon", "delta", "noise")},
        "claim": claim["sentence"],
        "verdict": verdict(found, claimed),
        "picture": None if picture is None else str(picture),
    }


def _show(found: dict[str, Any]) -> None:
    say(found["claim"])
    if found["mode"] == "runs":
        kinds = {"absent": "false_positives", "present": "false_negatives"}
        rows = [
            [
                f"canary {who}",
                key.replace("_", " ")[:-1],
                *(f"{found[key][end]:.4f}" for end in ("rate", "low", "high")),
                f"{found[key]['of']:,}",
            ]
            for who, key in kinds.items()
        ]
        say("")
        print_columns(rows, ["", "error", "rate", "low", "high", "runs"], range(2, 6))
        claimed = found["claimed_false_negatives"]
        say(f"claimed at this false positive rate: a false negative rate of {claimed:.4f} or more")
    say("", *found["verdict"])
    if found["picture"]:
        say(f"picture: {found['picture']}")
