"""`fedlens predict`: predicts image files with a model of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlens.base.format import many
from fedlens.cli.display.model_text import model_text
from fedlens.cli.display.output import complain, console, print_json, reported, say
from fedlens.cli.options import AcceptEdits, Debug, DeviceName, Json, ModelClient, ModelRound

if TYPE_CHECKING:
    from fedlens.use.predict import Output
    from fedlens.use.trained_model import TrainedModel

_SHOWN = 5  # faulty files that are named; predictions.csv has all


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory: runs/<name>/<run-id>.")],
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH", help="Image files, folders of them, or patterns in quotes: 'photos/**/*.jpg'."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder for predictions.csv and the labelled pictures; default RUN/predictions. New or empty.",
        ),
    ] = None,
    round: ModelRound = None,
    client: ModelClient = None,
    top: Annotated[int, typer.Option(min=1, help="The number of classes in a row.")] = 5,
    score: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Leave out boxes with a lower score; by default below task.shown_score, 0.25."
        ),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Draw a labelled picture of each image.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier predictions in DIR.")] = False,
    device: DeviceName = "auto",
    accept_changes: AcceptEdits = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict images with a model of a finished run; its data are not needed. Exits with 1 if a file is faulty."""
    with reported(debug, as_json):
        from fedlens.files.atomic_files import not_regular
        from fedlens.results.run import Run
        from fedlens.use.device_here import device_here
        from fedlens.use.predict import Output
        from fedlens.use.predict import predict as predictions
        from fedlens.use.trained_model import parsed_round

        directory = Run.open(run)
        if out is None and directory.predictions_path.is_symlink():
            raise not_regular(directory.predictions_path)
        output = Output(directory.predictions_path if out is None else out, pictures, force)
        output.check()
        here, said = device_here(device or "auto")
        trained = directory.model(parsed_round(round), client, accept_changes=accept_changes).on(here)
        notes = [*trained.notes, *said]
        count, faults = 0, []
        with _progress() as progress:
            for row in predictions(trained, paths, top, output, progress, score):
                count += 1
                if row["fault"] is not None:
                    faults.append({"path": row["path"], "fault": row["fault"]})
        _show(run, trained, output, notes, count, faults, score, as_json)
        if faults:
            for fault in faults[:_SHOWN]:
                complain("warning", f"{fault['path']}: {fault['fault']}.")
            more = f"; {output.table} names all" if len(faults) > _SHOWN else ""
            complain("error", f"{many(len(faults), 'file')} of {count:,} could not be predicted{more}.")
            raise typer.Exit(1)


def _show(
    run: Path,
    trained: TrainedModel,
    output: Output,
    notes: Sequence[str],
    count: int,
    faults: Sequence[Mapping[str, str]],
    score: float | None,
    as_json: bool,
) -> None:
    """Prints what was predicted, and where it is."""
    annotates = trained.task.annotates
    if as_json:
        print_json(
            {
                "run": str(run),
                "round": trained.round,
                "chosen": vars(trained.chosen),
                "images": count - len(faults),
                "faults": faults,
                "predictions": str(output.table),
                "pictures": str(output.pictures_folder) if output.pictures else None,
                "masks": str(output.masks_folder) if annotates == "masks" else None,
                "boxes": str(output.boxes_file) if annotates == "boxes" else None,
                "notes": notes,
            }
        )
    else:
        for note in notes:
            say(f"note: {note}")
        say(f"predicted {many(count - len(faults), 'image')} with {model_text(trained)}: {output.table}")
        if annotates == "masks":
            say(f"masks, in the size of the files: {output.masks_folder}")
        if annotates == "boxes":
            lowest = trained.task.shown_score if score is None else score
            say(f"boxes with a score of {lowest:g} or more, in COCO's format: {output.boxes_file}")
        if output.pictures:
            say(f"labelled pictures: {output.pictures_folder}")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows the number of predicted images on standard error, if it is a terminal."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda done, images: None
        return
    with screen.status("reading the model") as status:
        yield lambda done, images: status.update(f"predicted {done:,} of {images:,} images")
