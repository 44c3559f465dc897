"""`fedlens privacy`: what an experiment would spend, without training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlens.base.format import many
from fedlens.base.printable import printable
from fedlens.cli.display.output import print_columns, reported, stdout_kept_clean
from fedlens.cli.options import Changes, DataDir, Debug, Download, Json

if TYPE_CHECKING:
    from fedlens.privacy.settings import PrivacySettings
    from fedlens.run.build import Built

_SHOWN = 8  # rounds of the table


def privacy(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    changes: Changes = None,
    epsilon: Annotated[
        float | None,
        typer.Option(min=0.0, help="Also print the noise_multiplier that keeps the run within this epsilon."),
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the epsilon that an experiment spends by round, or the noise for an epsilon, without training.

    The settings are checked and the data are read, since the number of clients counts. Epsilon is that of the table
    [privacy], by privacy loss distributions (PLD) where they know the sampling, and by Rényi divergences (RDP). With
    privacy.unit = "example" it is that of each client, if it takes part in every round.
    """
    with reported(debug, as_json) as output:
        with stdout_kept_clean(as_json):
            answer = _answer(recipe, changes or (), epsilon, data_dir, download)
        if as_json:
            output.json(answer)
            return
        print(printable(answer["sentence"]))
        for sentence in answer["assumed"]:
            print(printable(sentence))
        print()
        if "rounds" not in answer:
            _print_clients(answer["clients"])
        else:
            _print_rounds(answer["rounds"])
        if "noise_multiplier" in answer:
            print(
                f"\nnoise_multiplier = {answer['noise_multiplier']:g} keeps the run within epsilon = {epsilon:g}"
            )


def _print_rounds(rounds: list[dict[str, Any]]) -> None:
    rows = [
        [f"{row['round']:,}", *("" if row[k] is None else f"{row[k]:.4g}" for k in ("pld", "rdp"))]
        for row in rounds
    ]
    print_columns(rows, ["round", "epsilon (PLD)", "epsilon (RDP)"], range(3))


def _print_clients(clients: list[dict[str, Any]]) -> None:
    rows = [
        [
            printable(row["client"]),
            f"{row['examples']:,}",
            f"{row['q']:.3g}",
            f"{row['steps']:,}",
            "" if row["epsilon"] is None else f"{row['epsilon']:.4g}",
        ]
        for row in clients[:_SHOWN]
    ]
    print_columns(rows, ["client", "examples", "q", "steps", "epsilon (RDP)"], range(1, 5))
    if len(clients) > _SHOWN:
        print(f"and {many(len(clients) - _SHOWN, 'client')} with at most the last epsilon")


def _answer(
    recipe: str, changes: Any, epsilon: float | None, data_dir: Any, download: bool
) -> dict[str, Any]:
    from fedlens.core.types import client_name
    from fedlens.privacy.accounting import epsilons, noise_for, noise_for_most, planned
    from fedlens.privacy.guarantee import example_guarantee, guarantee

    built, settings = private_experiment(recipe, changes, data_dir, download)
    config, delta, release = built.config, settings.delta, built.algorithm.release
    if release is None:  # each client adds the noise itself
        each = {
            client_name(k, built.partition.ids): built.algorithm.client_release(k) or {}
            for k in built.algorithm.candidates(built.federation)
        }
        spent = example_guarantee(settings, {client: [one] * config.rounds for client, one in each.items()})
        if epsilon is not None:
            spent["noise_multiplier"] = noise_for_most(epsilon, delta, config.rounds, each.values())
        return spent
    rounds = sorted({max(1, math.ceil(config.rounds * k / _SHOWN)) for k in range(1, _SHOWN + 1)} | {1})
    by_round = {t: epsilons(planned(release, t), delta) for t in rounds}
    table = [
        {"round": t, **{k: v if v is not None and math.isfinite(v) else None for k, v in vars(e).items()}}
        for t, e in by_round.items()
    ]
    found = {**guarantee(settings, planned(release, config.rounds), config.record.unsafe), "rounds": table}
    if epsilon is not None:
        found["noise_multiplier"] = noise_for(epsilon, delta, config.rounds, release)
    return found


def private_experiment(
    recipe: str, changes: Any, data_dir: Any, download: bool
) -> tuple[Built, PrivacySettings]:
    """An experiment that is ready to run, and its table [privacy].

    Raises `ConfigError` if it has no such table.
    """
    from fedlens.base.errors import ConfigError
    from fedlens.run.build import build, data_directory
    from fedlens.settings.config import read_config
    from fedlens.settings.config_source import read_source
    from fedlens.settings.plan import plan

    source = read_source(recipe, changes)
    config = read_config(source.values, source.locate)
    if config.privacy is None:
        raise ConfigError(
            "the experiment has no table [privacy], so it promises nothing",
            where=recipe,
            hint="add privacy = {clip = 0.1, noise_multiplier = 1.0, delta = 1e-5}",
        )
    built = build(plan(config, source), data_directory(data_dir), download)
    return built, config.privacy
