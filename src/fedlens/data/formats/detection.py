"""Builds the scan of a detection dataset: the part that COCO, VOC and YOLO share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from fedlens.core.errors import ConfigError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.clients import describe, listed
from fedlens.data.formats.objects import RawBox, check_boxes
from fedlens.data.formats.probe import probe_all
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named

Size = tuple[int, int]
_TURNING = range(2, 9)  # what the EXIF tag "Orientation" may be beside 1, upright
_SAME_SIZE = range(2, 5)  # of these, what mirrors the image or turns it by half a circle
_TAGGED = (".jpg", ".jpeg", ".tif", ".tiff", ".webp")  # photographs that may have a tag that turns them


def by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each name without its ending.

    >>> by_stem(["a/x.jpg", "a/x.png", "b.jpg"])
    {'a/x': ['a/x.jpg', 'a/x.png'], 'b': ['b.jpg']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        folder, slash, file = name.rpartition("/")
        found.setdefault(f"{folder}{slash}{file.rpartition('.')[0]}", []).append(name)
    return found


def below(folder: str, name: str) -> str:
    """The file `name` of a folder below the data, as seen from the data.

    >>> below("images/train", "a.jpg"), below(".", "a.jpg")
    ('images/train/a.jpg', 'a.jpg')
    """
    return (PurePosixPath(folder) / name).as_posix()


def folder_splits(
    names: Sequence[str], folder: Path, findings: Findings
) -> tuple[list[str] | None, list[str]]:
    """(split of each file, paths without the folder that says so).

    It is the first folder in the path that is named like a split; None where no path has one. Files that lie in
    no such folder while others do are a finding.

    >>> folder_splits(["images/train/x/a.jpg", "images/val/b.jpg"], Path(), Findings())
    (['train', 'validation'], ['images/x/a.jpg', 'images/b.jpg'])
    """
    places = [
        next((at for at, part in enumerate(name.split("/")[:-1]) if split_named(part)), None)
        for name in names
    ]
    if all(at is None for at in places):
        return None, list(names)
    lost = [name for name, at in zip(names, places, strict=True) if at is None]
    if lost:
        count = "an image is" if len(lost) == 1 else f"{len(lost):,} images are"
        what = f"{count} in no split, while others are: {listed(lost)}"
        findings.add(folder, what, "move them to a folder train, val or test", example=False)
    splits, rest = [], []
    for name, at in zip(names, places, strict=True):
        parts = name.split("/")
        part = parts.pop(at) if at is not None else "train"
        splits.append(split_named(part) or "train")
        rest.append("/".join(parts))
    return splits, rest


def numbered(classes: Sequence[str]) -> dict[str | int, int]:
    """The label of each class name. Raises `ConfigError` where a name of the setting `classes` stands twice."""
    labels: dict[str | int, int] = {name: at for at, name in enumerate(classes)}
    if len(labels) < len(classes):
        raise ConfigError("a name stands twice in 'classes'", where="classes", hint="remove one")
    return labels


def stored_sizes(
    scan: Scan, stated: Sequence[Size | None], sources: Sequence[str], findings: Findings, *, full: bool
) -> list[Size | None]:
    """(width, height) of each stored image; None where the file is at fault, or is not of the `stated` size.

    Both are findings. `sources` is where each size is stated. Photographs with a tag that turns them are noted,
    where no size is stated or it is the same turned: their boxes are taken to be on the pixels as they are
    stored, and some tools draw on the turned image.
    """
    names = scan.names
    sizes = probe_all(scan.folder, names, findings, full=full)
    for row, (size, said) in enumerate(zip(sizes, stated, strict=True)):
        if size is not None and said is not None and size != said:
            what = f"it says {said[0]} x {said[1]} pixels, and the image is {size[0]} x {size[1]}"
            hint = "annotate the image as it is stored"
            if size == (said[1], said[0]):
                hint = "store the image turned as it was annotated, without the EXIF tag that turns it"
            findings.add(sources[row], f"{what}: '{names[row]}'", hint)
            sizes[row] = None
    doubtful = zip(names, sizes, stated, strict=True)
    tagged = [name for name, size, said in doubtful if size and _is_turned(scan.folder / name, said)]
    if tagged:
        scan.notes.append(
            f"{len(tagged):,} images have a tag that turns them; boxes are taken on the pixels as they are "
            f"stored: {listed(tagged)}"
        )
    return sizes


def _is_turned(file: Path, stated: Size | None) -> bool:
    """Whether a tag turns a photograph without that its `stated` size could tell."""
    if file.suffix.lower() not in _TAGGED:
        return False
    try:
        with Image.open(file) as image:
            tag = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # what is wrong with it is found elsewhere
        return False
    return tag in _TURNING if stated is None or stated[0] == stated[1] else tag in _SAME_SIZE


def detected(
    scan: Scan,
    raw: Sequence[Iterable[RawBox]],
    labels: Mapping[str | int, int],
    settings: Mapping[str, Any],
    findings: Findings,
    *,
    records: Mapping[str, Sequence[Any]] | None = None,
    inner: Sequence[str] | None = None,
) -> Scan:
    """The scan with its boxes checked, and what is known of the images beside them.

    Args:
        scan: with names, classes, sizes (None where an image is at fault), and splits where the layout has any.
        raw: [n], the objects of each image as the files have them.
        labels: the label of each class that the files may name.
        records, inner: as `describe` takes them. A table's splits go before the layout's.
    """
    assert scan.sizes is not None
    scan.boxes, scan.box_labels = [], []
    for row, (size, found) in enumerate(zip(scan.sizes, raw, strict=True)):
        if size is None:
            scan.bad.add(row)
            boxes, classes = np.empty((0, 4), np.float32), np.empty(0, np.int64)
        else:
            boxes, classes = check_boxes(found, *size, labels, findings)
        scan.boxes.append(boxes)
        scan.box_labels.append(classes)
    described = describe(scan.names, settings, scan.folder, findings, records=records, inner=inner)
    scan.columns = described.columns
    scan.splits = described.splits or scan.splits
    scan.bad |= described.bad
    scan.notes += described.notes
    rows = scan.rows()
    if rows and not len(findings) and not any(len(scan.boxes[row]) for row in rows):
        what = f"none of the {len(rows):,} images has an object"
        findings.add(scan.folder, what, "see to the format, and to where the annotations are", example=False)
    return scan
