"""The files of a Pascal VOC folder: lists of images, and boxes in XML. BCCD is published in the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedlens.data.boxes import Boxes, placed
from fedlens.data.dataset import Examples
from fedlens.data.datasets.dataset_files import damaged, get_again
from fedlens.data.datasets.folders import check_present
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.detection import RawBoxes
from fedlens.data.formats.splits import label_of_class
from fedlens.data.formats.voc_xml import read_annotation, read_list
from fedlens.data.images import Fit, ImageFiles, Paths


@dataclass(frozen=True)
class VocFolder:
    """Where a set in this form lies, and what its classes are called.

    Args:
        root: the data folder.
        inner: the folder of the dataset below it, as file names have it.
        classes: the names in the XML files, in the order of the labels.
        difficult: whether objects marked as difficult count as objects.
    """

    root: Path
    inner: str
    classes: tuple[str, ...]
    difficult: bool = True

    @property
    def path(self) -> Path:
        """The folder of the dataset."""
        return self.root / self.inner

    def ids(self, names: Sequence[str], task: str = "Main") -> list[str]:
        """The images that the lists `names` of ImageSets name, one list after the other."""
        return [each for name in names for each in read_ids(self.path / "ImageSets" / task / f"{name}.txt")]


def read_ids(path: Path) -> list[str]:
    """The names of images in a list, one a line.

    Raises `DataError` if it cannot be read or is empty, or with all lines of several words and all names
    that are there twice.
    """
    findings = Findings(remedy=get_again(path))
    listed = read_list(path, findings)
    for name, where in listed:
        if len(name.split()) > 1:
            findings.add(where, f"one name was expected, found '{name}'")
    if not listed and not len(findings):
        findings.add(path, "the list is empty")
    findings.settle(None)
    return [name for name, _ in listed]


def no_leak(train: Sequence[str], test: Sequence[str], where: Path) -> None:
    """Raises `DataError` if images are in both splits."""
    both = sorted(set(train) & set(test))
    if both:
        raise damaged(f"{len(both):,} images are for training and for testing, the first is {both[0]}", where)


def detection_splits(
    folder: VocFolder, train: Sequence[str], test: Sequence[str], size: tuple[int, int], fit: Fit
) -> tuple[Examples, Examples, tuple[str, ...]]:
    """(training, test, notes): the images of the lists `train` and `test` in ImageSets/Main, with their boxes.

    Raises `DataError` if an image is in both, or as `detection` does.
    """
    train_ids, test_ids = folder.ids(train), folder.ids(test)
    no_leak(train_ids, test_ids, folder.path / "ImageSets" / "Main")
    train_split, train_notes = detection(folder, train_ids, size, fit, "train")
    test_split, test_notes = detection(folder, test_ids, size, fit, "test")
    return train_split, test_split, (*train_notes, *test_notes)


def detection(
    folder: VocFolder, ids: Sequence[str], size: tuple[int, int], fit: Fit, split: str
) -> tuple[Examples, tuple[str, ...]]:
    """(examples, notes): the images `ids` with their boxes, in pixels of the delivered image.

    The corners are turned into edges counted from 0: (xmin - 1, ymin - 1, xmax, ymax). Left out and counted in
    the notes are objects whose corners coincide or are the wrong way round (xmax <= xmin or ymax <= ymin), those
    that `placed` cannot place, and difficult ones if `folder.difficult` is false.

    Raises `DataError` if files are missing, and with all problems of the XML files, such as an unknown class.
    """
    for kind, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml")):
        check_present(folder.path, [f"{kind}/{each}.{suffix}" for each in ids], f"{folder.path}, {split}")
    files = [folder.path / "Annotations" / f"{each}.xml" for each in ids]
    findings = Findings(remedy=get_again(files[0]))
    # The corners as they are written: single precision rounds them before 1 is subtracted.
    read = partial(read_annotation, findings=findings, first_pixel=0, difficult=folder.difficult, sized=True)
    found = list(map(read, files))
    raw = RawBoxes.of(() if each is None else each.objects for each in found)
    labels = raw.published_labels(label_of_class(folder.classes), findings)
    findings.settle(None)
    sized = [each for each in found if each is not None]
    kept = (raw.corners[:, 2:] > raw.corners[:, :2]).all(axis=1)
    edges = raw.corners[kept].astype(np.float32) - np.array([1, 1, 0, 0], np.float32)
    given = Boxes(edges, labels[kept], np.searchsorted(raw.rows[kept], np.arange(len(ids) + 1)))
    result = placed(given, np.array([each.size for each in sized]), *size, fit)
    left_out = {
        "they are marked as difficult": 0 if folder.difficult else sum(each.difficult for each in sized),
        "the corners of their box coincide": int((~kept).sum()),
    }
    notes = [
        f"{split}, objects left out because {why}: {count:,}" for why, count in left_out.items() if count
    ]
    names = Paths.of([f"{folder.inner}/JPEGImages/{each}.jpg" for each in ids])
    examples = Examples(ImageFiles(folder.root, names, 3, *size, fit), result.boxes, {"image": np.array(ids)})
    return examples, (*notes, *result.notes(split))
