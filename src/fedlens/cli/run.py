"""`fedlens run`: train the experiment of a recipe or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.cli.options import Changes, DataDir, Debug, Download, EngineName, Json, Quiet, Report
from fedlens.cli.output import reported
from fedlens.cli.run_with_progress import train

if TYPE_CHECKING:
    from fedlens.api import Result
    from fedlens.cli.progress_display import ProgressDisplay


def run(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    changes: Changes = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    engine: EngineName = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run directory; default runs/<name>/<run-id>.")
    ] = None,
    data_dir: DataDir = None,
    download: Download = False,
    report: Report = True,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run an experiment, and write its results and a result page to a run directory."""

    with reported(debug, as_json) as output:
        settings = overrides(changes or (), rounds, seed, engine)

        def start(progress: ProgressDisplay) -> Result:
            from fedlens.api import Experiment

            experiment = Experiment.load(recipe, settings)
            return experiment.run(out, data_dir=data_dir, download=download, progress=progress, report=report)

        train(start, quiet=quiet, output=output)


def overrides(changes: Sequence[str], rounds: int | None, seed: int | None, engine: str | None) -> list[str]:
    """The settings of the command line as key=value; those with an option of their own come last and win.

    >>> overrides(["local.lr=0.1"], 5, None, "inline")
    ['local.lr=0.1', 'rounds=5', 'engine.name=inline']
    """
    named = {"rounds": rounds, "seed": seed, "engine.name": engine}
    return [*changes, *(f"{key}={value}" for key, value in named.items() if value is not None)]
