"""`fedlens export`: writes a model of a run as a file that needs no fedlens."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.model_text import model_text
from fedlens.cli.display.output import complain, print_json, reported, say
from fedlens.cli.options import AcceptEdits, Debug, Json, ModelClient, ModelRound


class ModelFormat(StrEnum):
    """A file format of models."""

    ONNX = "onnx"
    PT2 = "pt2"
    SAFETENSORS = "safetensors"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory: runs/<name>/<run-id>.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file; FILE.json is written beside it.")],
    format: Annotated[
        ModelFormat | None,
        typer.Option("--format", help="The format; by default the ending of FILE.", show_default=False),
    ] = None,
    round: ModelRound = None,
    client: ModelClient = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    accept_changes: AcceptEdits = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a model of a finished run: ONNX, a PyTorch program (pt2), or its weights (safetensors)."""
    with reported(debug, as_json):
        from fedlens.results.run import Run
        from fedlens.use.export import export as write
        from fedlens.use.trained_model import parsed_round

        trained = Run.open(run).model(parsed_round(round), client, accept_changes=accept_changes)
        exported = write(trained, out, None if format is None else str(format), force)
        if as_json:
            print_json(
                {
                    "file": str(exported.file),
                    "json": str(exported.json_file),
                    "error": exported.error,
                    "chosen": vars(trained.chosen),
                    "notes": list(trained.notes),
                    **{key: value for key, value in exported.facts.items() if key != "file"},
                }
            )
        else:
            for note in trained.notes:
                say(f"note: {note}")
            say(f"exported {model_text(trained)}: {exported.file}")
            if exported.error is not None:
                say(
                    f"its outputs differ from the run's model by at most {exported.error:.1g} on random images"
                )
            say(f"classes, preprocessing and licence: {exported.json_file}")
        if exported.facts["notice"]:
            complain("warning", exported.facts["notice"])
