"""`fedlens pretrain`: trains a model, and writes its weights as one file for other runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.base.shell_command import shell_command
from fedlens.cli.display.output import reported
from fedlens.cli.options import (
    AcceptEdits,
    Changes,
    DataDir,
    Debug,
    Download,
    EngineName,
    Json,
    Quiet,
    Report,
    Strict,
)
from fedlens.cli.run import overrides
from fedlens.cli.run_with_progress import train

if TYPE_CHECKING:
    from fedlens.api import Result
    from fedlens.cli.display.run_display import RunDisplay


def pretrain(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_FILE", help="A recipe (fedlens list recipes) or a TOML file.")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The weights, FILE.safetensors; the run directory is FILE.run."),
    ],
    changes: Changes = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.")] = None,
    engine: EngineName = None,
    data_dir: DataDir = None,
    download: Download = False,
    report: Report = True,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    accept_changes: AcceptEdits = False,
    quiet: Quiet = False,
    as_json: Json = False,
    strict: Strict = False,
    debug: Debug = False,
) -> None:
    """Pre-train a model, and write its weights, a picture of its data and a card. Called again, it resumes."""
    written: dict[str, Path] = {}

    with reported(debug, as_json) as output:
        settings = overrides(changes or (), rounds, seed, engine)

        def start(progress: RunDisplay) -> Result:
            from fedlens.pretraining import pretrain as pretrained

            made = pretrained(
                recipe,
                out,
                settings,
                data_dir=data_dir,
                download=download,
                progress=progress,
                report=report,
                force=force,
                accept_changes=accept_changes,
            )
            written.update({"weights": made.files.weights, "card": made.files.card})
            if made.files.sheet.is_file():
                written["training images"] = made.files.sheet
            return made.result

        again = shell_command(*sys.argv[1:])
        train(start, quiet=quiet, output=output, strict=strict, again=again, files=written)
