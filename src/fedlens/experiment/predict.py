"""Predicts image files with a model of a run, in batches: rows of a table, and labelled pictures."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedlens.core.errors import ConfigError, DataError, one_line
from fedlens.core.threads import usable_cores
from fedlens.data.formats.file_safety import is_below
from fedlens.data.formats.named_images import NamedImage, named_images
from fedlens.data.formats.probe import probe
from fedlens.data.image_form import ImageForm
from fedlens.data.normalize import normalize
from fedlens.experiment.atomic_files import create, not_regular, refused, replacing
from fedlens.experiment.trained_model import TrainedModel

_VALUES = 2**22  # of a batch of images
_MOST = 256  # images of a batch
_PICTURE = re.compile(r"\d{6,}-.*\.png")
_NAME = 80  # characters of a file's name in the name of its picture

Row = dict[str, Any]
Progress = Callable[[int, int], None]  # images done, and all


@dataclass(frozen=True)
class Output:
    """The folder that predictions are written to: `predictions.csv`, and `pictures/` with a picture of each image.

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

    def make(self) -> None:
        """Makes the folders and removes the pictures of an earlier prediction. Raises `RunFailed`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.pictures_folder.is_symlink():
                raise not_regular(self.pictures_folder)
            if self.pictures_folder.is_dir():
                for path in self.pictures_folder.iterdir():
                    if _PICTURE.fullmatch(path.name):
                        path.unlink()
            if self.pictures:
                self.pictures_folder.mkdir(exist_ok=True)
        except OSError as error:
            raise refused(error, "the predictions", self.folder) from error


def predict(
    trained: TrainedModel,
    paths: Sequence[str | os.PathLike[str]],
    top: int = 5,
    output: Output | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yields the prediction of each image file, in the order of `paths`: `path`, the task's columns, and `fault`.

    `fault` is None, or says why the file could not be predicted; the task's columns are None then. With `output`, the
    rows are also written to a CSV file when all are done, and a picture of each image is drawn. At most two batches of
    images are in memory.

    Raises `RunDirectoryError` for a model of texts, `DataError` if the paths name no image, `ConfigError` if `top` is
    below 1 or the output folder is not empty, and `RunFailed` if the disk refuses.
    """
    trained.require_images()
    if top < 1:
        raise ConfigError(f"top is {top}, but must be at least 1", where="top", hint="take 5")
    images = named_images(paths)
    if output is None:
        yield from _rows(trained, images, top, None, progress)
        return
    output.check()
    inside = os.path.realpath(output.folder)
    images = [image for image in images if not is_below(os.path.realpath(image.path), inside)]
    if not images:
        what, hint = "all images are in the output folder", "choose another folder with --out"
        raise DataError(what, where=str(output.folder), hint=hint)
    output.make()
    try:
        with ExitStack() as held:
            descriptor = create(held.enter_context(replacing(output.table)))
            # Names of files need not be UTF-8 (PEP 383).
            form: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
            file = held.enter_context(open(descriptor, "w", **form))
            writer = csv.DictWriter(file, ["path", *_columns(trained, top), "fault"])
            writer.writeheader()
            pictures = output.pictures_folder if output.pictures else None
            for row in _rows(trained, images, top, pictures, progress):
                writer.writerow(row)
                yield row
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        raise refused(error, "the predictions", output.folder) from error


def _columns(trained: TrainedModel, top: int) -> list[str]:
    """The names of the task's columns."""
    form = trained.form
    (prediction,) = _predicted(trained, np.zeros((1, form.channels, form.height, form.width), np.uint8))
    return list(trained.task.row(prediction, trained.classes, top))


def _rows(
    trained: TrainedModel,
    images: Sequence[NamedImage],
    top: int,
    pictures: Path | None,
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
            good = [one for one in decoded if not isinstance(one, str)]
            predictions = iter(_predicted(trained, np.stack(good)) if good else [])
            drawn = []
            for at, one in zip(batch, decoded, strict=True):
                path = images[at].path
                if isinstance(one, str):
                    yield {"path": str(path), **nothing, "fault": one}
                    continue
                prediction = next(predictions)
                if pictures is not None:
                    drawn.append(pool.submit(_draw, trained, one, prediction, _picture(pictures, at, path)))
                yield {"path": str(path), **trained.task.row(prediction, trained.classes, top), "fault": None}
            for future in drawn:
                future.result()
            if progress is not None:
                progress(batch.stop, len(images))


def _start(
    pool: Executor, form: ImageForm, images: Sequence[NamedImage], batch: range
) -> list[Future[NDArray[np.uint8] | str]]:
    return [pool.submit(_decoded, form, images[at]) for at in batch]


def _decoded(form: ImageForm, image: NamedImage) -> NDArray[np.uint8] | str:
    """uint8 [C, H, W], or why the file cannot be decoded."""
    if image.fault is not None:
        return image.fault
    try:
        probe(image.path)  # says more of a faulty file than the decoder does, and never waits for a pipe
        return form.decode(image.path)
    except DataError as error:
        return "; ".join(filter(None, [error.what, error.hint]))


def _predicted(trained: TrainedModel, images: NDArray[np.uint8]) -> list[dict[str, NDArray[Any]]]:
    """The prediction of each image of a batch, uint8 [n, C, H, W]."""
    with torch.inference_mode():
        outputs = trained.outputs(normalize(torch.from_numpy(images), trained.mean, trained.std))
        prediction = {name: value.numpy() for name, value in trained.task.predict(outputs).items()}
    return [{name: value[at] for name, value in prediction.items()} for at in range(len(images))]


def _picture(folder: Path, at: int, image: Path) -> Path:
    """The file of the picture of the image in this row, counted from 0."""
    name = one_line(image.stem[:_NAME].encode(errors="replace").decode())
    return folder / f"{at + 1:06d}-{name.replace(os.sep, '_')}.png"


def _draw(
    trained: TrainedModel, image: NDArray[np.uint8], prediction: Mapping[str, NDArray[Any]], path: Path
) -> None:
    picture = Image.fromarray(trained.task.draw(image, prediction, classes=trained.classes))
    with open(create(path), "wb") as file:
        picture.save(file, "PNG", compress_level=1)
