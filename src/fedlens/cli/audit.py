"""`fedlens audit`: whether the differential privacy that an experiment claims can be refuted from outside."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from fedlens.cli.display.output import reported, say, stdout_kept_clean
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
            found = _found(recipe, changes or (), runs, one_run, data_dir, download)
        if as_json:
            output.json(found)
        else:
            say(found["claim"], *found["verdict"])
        if found["violation"]:
            raise typer.Exit(1)


def _found(
    recipe: str, changes: Any, runs: int | None, one_run: bool, data_dir: Any, download: bool
) -> dict[str, Any]:
    from fedlens.analyses.privacy_audit import audit_one_run, audit_runs, verdict
    from fedlens.base.errors import ConfigError
    from fedlens.privacy.guarantee import guarantee

    if one_run and runs is not None:
        raise ConfigError(
            "--one-run and --runs exclude each other", where="--runs", hint="remove one of them"
        )
    built, settings = private_experiment(recipe, changes, data_dir, download)
    tell = partial(typer.echo, err=True)
    found = audit_one_run(built) if one_run else audit_runs(built, runs or _RUNS, tell)
    claim = guarantee(
        settings, [built.algorithm.release or {}] * built.config.rounds, built.config.record.unsafe
    )
    claimed = f"epsilon = {claim['epsilon']:.3g} at delta = {settings.delta:g}"
    about = {name: claim[name] for name in ("epsilon", "delta", "noise")}
    return {**found, **about, "claim": claim["sentence"], "verdict": verdict(found, claimed)}
