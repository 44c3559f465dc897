"""Predicts image files with a model of a run, in batches: rows of a table, masks or boxes, and labelled pictures."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.printable import csv_cell
from fedlens.base.threads import usable_cores
from fedlens.data.decoding import ImageForm
from fedlens.data.formats.file_safety import is_below
from fedlens.data.formats.folder_listing import NamedImage, named_images
from fedlens.data.formats.probe import probe
from fedlens.data.normalize import normalize
from fedlens.files.atomic_files import create, not_regular, refused, replacing
from fedlens.use.annotation_files import (
    Annotations,
    CocoFile,
    MaskFiles,
    above,
    in_file,
    is_numbered,
    numbered,
)
from fedlens.use.trained_model import TrainedModel

_VALUES = 2**22  # of a batch of images
_MOST = 256  # images of a batch

Row = dict[str, Any]
Progress = Callable[[int, int], None]  # images done, and all


@dataclass(frozen=True)
class Output:
    """The folder that predictions are written to: `predictions.csv`, and `pictures/` with a picture of each image.

    Of masks also `masks/`, of boxes `predictions.json`; see `fedlens.use.annotation_files`.

    Args:
        folder: made if it does not exist.
        pictures: whether pictures are drawn.
        force: whether files of an earlier prediction are replaced; other files in the folder stay.
    """

    folder: Path
    pictures: bool = True
    force: bool = False

    @property
    def table(self) -> Path:
        """The file with the rows."""
        return self.folder / "predictions.csv"

    @property
    def pictures_folder(self) -> Path:
        """The folder of the pictures."""
        return self.folder / "pictures"

    @property
    def masks_folder(self) -> Path:
        """The folder of the masks."""
        return self.folder / "masks"

    @property
    def boxes_file(self) -> Path:
        """The file with the boxes."""
        return self.folder / "predictions.json"

    def annotations(self, trained: TrainedModel) -> Annotations | None:
        """What is written of this model's predictions beside the table; None if it finds nothing with a place."""
        match trained.task.annotates:
            case "masks":
                return MaskFiles(self.masks_folder, trained.form.fit, len(trained.classes))
            case "boxes":
                return CocoFile(self.boxes_file, trained.classes)
        return None

    def check(self) -> None:
        """Raises `ConfigError` if the folder is a file, or is not empty and `force` is not set. Writes nothing."""
        try:
            occupied = any(self.folder.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            what = (
                "it is a file, not a folder"
                if self.folder.is_file()
                else f"it cannot be read: {error.strerror}"
            )
            raise ConfigError(what, where=str(self.folder), hint="choose another folder with --out") from None
        if occupied and not self.force:
            hint = "choose another folder with --out, or pass --force to replace earlier predictions"
            raise ConfigError("the output folder is not empty", where=str(self.folder), hint=hint)

    def make(self, masks: bool = False) -> None:
        """Makes the folders and removes the files of an earlier prediction. Raises `RunFailed`.

        Args:
            masks: whether masks are written.
        """
        wanted = {self.pictures_folder: self.pictures, self.masks_folder: masks}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in wanted:
                if folder.is_symlink():
                    raise not_regular(folder)
                for path in folder.iterdir() if folder.is_dir() else ():
                    if is_numbered(path.name):
                        path.unlink()
            self.boxes_file.unlink(missing_ok=True)
            for folder in (folder for folder, used in wanted.items() if used):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise refused(error, "the predictions", self.folder) from error


def predict(
    trained: TrainedModel,
    paths: Sequence[str | os.PathLike[str]],
    top: int = 5,
    output: Output | None = None,
    progress: Progress | None = None,
    score: float | None = None,
) -> Iterator[Row]:
    """Yields the prediction of each image file, in the order of `paths`: `path`, the task's columns, and `fault`.

    `fault` is None, or says why the file could not be predicted; the task's columns are None then. With `output`, the
    rows are also written to a CSV file when all are done, with texts as `csv_cell` makes them, masks and boxes to files
    of their own, and a picture of each image is drawn. At most two batches of images are in memory.

    Args:
        top: how many classes a row of a classifier has.
        score: the boxes of a detector with a lower score are left out; by default `shown_score` of the task.

    Raises `RunDirectoryError` for a model of texts, `DataError` if the paths name no image, `ConfigError` if `top` is
    below 1, `score` is not in [0, 1] or the output folder is not empty, and `RunFailed` if the disk refuses.
    """
    trained.require_images()
    if score is not None:
        if not 0 <= score <= 1:
            raise ConfigError(f"score is {score}, but must be in [0, 1]", where="score", hint="take 0.25")
        trained = replace(trained, task=trained.task.showing(score))
    if top < 1:
        raise ConfigError(f"top is {top}, but must be at least 1", where="top", hint="take 5")
    images = named_images(paths)
    if output is None:
        yield from _rows(trained, images, top, _Files(), progress)
        return
    output.check()
    inside = os.path.realpath(output.folder)
    images = [image for image in images if not is_below(os.path.realpath(image.path), inside)]
    if not images:
        what, hint = "all images are in the output folder", "choose another folder with --out"
        raise DataError(what, where=str(output.folder), hint=hint)
    output.make(trained.task.annotates == "masks")
    try:
        with ExitStack() as held:
            descriptor = create(held.enter_context(replacing(output.table)))
            file = held.enter_context(open(descriptor, "w", encoding="utf-8", newline=""))
            writer = csv.writer(file)
            writer.writerow(columns := ["path", *_columns(trained, top), "fault"])
            files = _Files(output.pictures_folder if output.pictures else None, output.annotations(trained))
            for row in _rows(trained, images, top, files, progress):
                writer.writerow(csv_cell(row[name]) for name in columns)
                yield row
            if files.annotations is not None:
                files.annotations.finish()
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise refused(error, "the predictions", output.folder) from error


@dataclass(frozen=True)
class _Files:
    """What is written of each image beside its row."""

    pictures: Path | None = None  # the folder
    annotations: Annotations | None = None


def _columns(trained: TrainedModel, top: int) -> list[str]:
    """The names of the task's columns."""
    form = trained.form
    (prediction,) = _predicted(trained, np.zeros((1, form.channels, form.height, form.width), np.uint8))
    return list(trained.task.row(prediction, trained.classes, top))


def _rows(
    trained: TrainedModel,
    images: Sequence[NamedImage],
    top: int,
    files: _Files,
    progress: Progress | None,
) -> Iterator[Row]:
    """The rows of the images; while the model predicts a batch, threads decode the next one."""
    form = trained.form
    size = max(1, min(_MOST, _VALUES // (form.channels * form.height * form.width)))
    batches = [range(start, min(start + size, len(images))) for start in range(0, len(images), size)]
    nothing = dict.fromkeys(_columns(trained, top))
    with ThreadPoolExecutor(usable_cores()) as pool:
        ahead = _start(pool, form, images, batches[0])
        for number, batch in enumerate(batches):
            decoded = [future.result() for future in ahead]
            ahead = _start(pool, form, images, batches[number + 1]) if number + 1 < len(batches) else []
            good = [one.pixels for one in decoded if not isinstance(one, str)]
            predictions = iter(_predicted(trained, np.stack(good)) if good else [])
            written = []
            for at, one in zip(batch, decoded, strict=True):
                path = images[at].path
                if isinstance(one, str):
                    yield {"path": str(path), **nothing, "fault": one}
                    continue
                prediction = next(predictions)
                if files.pictures is not None:
                    picture = numbered(files.pictures, at, path)
                    written.append(pool.submit(_draw, trained, one.pixels, prediction, picture))
                if trained.task.annotates == "boxes":
                    prediction = in_file(prediction, form, one.size)
                if files.annotations is not None:
                    written.append(pool.submit(files.annotations.add, at, path, one.size, prediction))
                yield {"path": str(path), **trained.task.row(prediction, trained.classes, top), "fault": None}
            for future in written:
                future.result()
            if progress is not None:
                progress(batch.stop, len(images))


@dataclass(frozen=True, eq=False)
class _Decoded:
    pixels: NDArray[np.uint8]  # [C, H, W]
    size: tuple[int, int]  # width and height of the file


def _start(
    pool: Executor, form: ImageForm, images: Sequence[NamedImage], batch: range
) -> list[Future[_Decoded | str]]:
    return [pool.submit(_decoded, form, images[at]) for at in batch]


def _decoded(form: ImageForm, image: NamedImage) -> _Decoded | str:
    """The image, or why the file cannot be decoded."""
    if image.fault is not None:
        return image.fault
    try:
        probe(image.path)  # says more of a faulty file than the decoder does, and never waits for a pipe
        return _Decoded(form.decode(image.path), form.file_size(image.path))
    except DataError as error:
        return "; ".join(filter(None, [error.what, error.hint]))


def _predicted(trained: TrainedModel, images: NDArray[np.uint8]) -> list[Mapping[str, NDArray[Any]]]:
    """The prediction of each image of a batch, uint8 [n, C, H, W]; boxes from `shown_score` on."""
    with torch.inference_mode():
        outputs = trained.outputs(normalize(torch.from_numpy(images), trained.mean, trained.std))
        prediction = {name: value.cpu().numpy() for name, value in trained.task.predict(outputs).items()}
    each = [{name: value[at] for name, value in prediction.items()} for at in range(len(images))]
    if trained.task.annotates != "boxes":
        return list(each)
    return [above(one, trained.task.shown_score) for one in each]


def _draw(
    trained: TrainedModel, image: NDArray[np.uint8], prediction: Mapping[str, NDArray[Any]], path: Path
) -> None:
    picture = Image.fromarray(trained.task.draw(image, prediction, classes=trained.classes))
    with open(create(path), "wb") as file:
        picture.save(file, "PNG", compress_level=1)
