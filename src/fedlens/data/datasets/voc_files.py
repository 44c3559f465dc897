"""The files of a Pascal VOC folder: lists of images, and boxes in XML. BCCD is published in the same form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedlens.data.box_transforms import placed
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Examples
from fedlens.data.datasets.dataset_files import damaged, read_lines
from fedlens.data.datasets.folders import check_present
from fedlens.data.formats.voc_xml import Element, read_xml, text_of
from fedlens.data.images import Fit, ImageFiles, Paths


class VocObject(NamedTuple):
    """One object: its class, left, top, right, bottom as they are written, whether it counts as difficult, its line.

    The numbers are pixels counted from 1, and right and bottom are the last pixel of the object.
    """

    name: str
    corners: tuple[float, float, float, float]
    difficult: bool
    line: int


class Annotation(NamedTuple):
    """The content of one XML file: the size of the image, and its objects."""

    width: int
    height: int
    objects: tuple[VocObject, ...]


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

    Raises `DataError` if it cannot be read, is empty, has several words a line, or a name twice.
    """
    first: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), 1):
        words = line.split()
        if not words:
            continue
        if len(words) > 1:
            raise damaged(f"one name was expected, found '{line}'", path, number)
        if words[0] in first:
            raise damaged(f"'{words[0]}' occurs a second time, after line {first[words[0]]}", path, number)
        first[words[0]] = number
    if not first:
        raise damaged("the list is empty", path)
    return list(first)


def no_leak(train: Sequence[str], test: Sequence[str], where: Path) -> None:
    """Raises `DataError` if images are in both splits."""
    both = sorted(set(train) & set(test))
    if both:
        raise damaged(f"{len(both):,} images are for training and for testing, the first is {both[0]}", where)


def read_annotation(path: Path) -> Annotation:
    """Reads the XML file of an image. Raises `DataError` with the file, the line and what is wrong."""
    root = read_xml(path)
    size = _child(root, "size", path)
    width, height = (_number(size, side, path) for side in ("width", "height"))
    if width < 1 or height < 1:
        raise damaged(f"the file states an image size of {width:g}x{height:g}", path, size.sourceline)
    # Direct children only: an object of VOC may have parts (head, hand, foot) with boxes of their own.
    return Annotation(
        int(width), int(height), tuple(_object(element, path) for element in root.findall("object"))
    )


def _object(element: Element, path: Path) -> VocObject:
    box = _child(element, "bndbox", path)
    left, top, right, bottom = (_number(box, edge, path) for edge in ("xmin", "ymin", "xmax", "ymax"))
    _child(element, "name", path)
    name = text_of(element, "name") or ""
    difficult = text_of(element, "difficult") == "1"
    return VocObject(name, (left, top, right, bottom), difficult, element.sourceline)


def _child(element: Element, name: str, path: Path) -> Element:
    child = element.find(name)
    if child is None:
        raise damaged(f"<{element.tag}> has no <{name}>", path, element.sourceline)
    return child


def _number(element: Element, name: str, path: Path) -> float:
    """A number; some published corners have decimals."""
    child = _child(element, name, path)
    text = (child.text or "").strip()
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise damaged(f"<{name}> is '{text}', not a number", path, child.sourceline)
    return number


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

    Raises `DataError` if files are missing, or a class is unknown.
    """
    labels = {name: label for label, name in enumerate(folder.classes)}
    for kind, suffix in (("JPEGImages", "jpg"), ("Annotations", "xml")):
        check_present(folder.path, [f"{kind}/{each}.{suffix}" for each in ids], f"{folder.path}, {split}")
    corners, classes, counts, sizes, dropped = [], [], [], [], {"difficult": 0, "flat": 0}
    for each in ids:
        path = folder.path / "Annotations" / f"{each}.xml"
        annotation = read_annotation(path)
        kept = [one for one in annotation.objects if not _dropped(one, folder, dropped)]
        corners += [one.corners for one in kept]
        classes += [_label(one, labels, path) for one in kept]
        counts.append(len(kept))
        sizes.append((annotation.width, annotation.height))
    edges = np.array(corners, np.float32).reshape(-1, 4) - np.array([1, 1, 0, 0], np.float32)
    given = Boxes(edges, np.array(classes, np.int64), np.cumsum([0, *counts]))
    result = placed(given, np.array(sizes), *size, fit)
    notes = [
        f"{split}, objects left out because they are marked as difficult: {dropped['difficult']:,}",
        f"{split}, objects left out because the corners of their box coincide: {dropped['flat']:,}",
    ]
    told = [note for note, count in zip(notes, dropped.values(), strict=True) if count]
    names = Paths.of([f"{folder.inner}/JPEGImages/{each}.jpg" for each in ids])
    images = ImageFiles(folder.root, names, 3, *size, fit)
    return Examples(images, result.boxes, {"image": np.array(ids)}), (*told, *result.notes(split))


def _dropped(one: VocObject, folder: VocFolder, counts: dict[str, int]) -> bool:
    left, top, right, bottom = one.corners
    if one.difficult and not folder.difficult:
        counts["difficult"] += 1
    elif right <= left or bottom <= top:
        counts["flat"] += 1
    else:
        return False
    return True


def _label(one: VocObject, labels: Mapping[str, int], path: Path) -> int:
    if one.name not in labels:
        raise damaged(f"the class '{one.name}' is not one of {', '.join(labels)}", path, one.line)
    return labels[one.name]
