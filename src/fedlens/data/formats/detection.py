"""Completes the scan of a detection dataset: the part that COCO, VOC and YOLO share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fedlens.data.boxes import Boxes
from fedlens.data.decoding import orientation_of
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.clients import describe, listed
from fedlens.data.formats.folder_listing import stem
from fedlens.data.formats.objects import RawBoxes, check_boxes
from fedlens.data.formats.probe import probe_all, stored_sizes
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named

Size = tuple[int, int]
_TURNED = range(2, 9)  # values of the EXIF tag "Orientation" except 1, upright
_TURNED_SAME_SIZE = range(2, 5)  # of these, mirrored or turned by 180 degrees
_TAGGED = (".jpg", ".jpeg", ".tif", ".tiff", ".webp")  # photographs that may have the tag


def by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each name without its ending.

    >>> by_stem(["a/x.jpg", "a/x.png", "b.jpg"])
    {'a/x': ['a/x.jpg', 'a/x.png'], 'b': ['b.jpg']}
    """
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(stem(name), []).append(name)
    return files


def add_same_stem(folder: Path, names: Sequence[str], findings: Findings) -> None:
    """Adds the problem that one annotation would belong to several images."""
    what = f"{' and '.join(names)} have the same name, and an annotation can only belong to one of them"
    findings.add(folder, what, "rename or remove one of them")


def below(folder: str, name: str) -> str:
    """The file `name` of a folder below the data, as seen from the data.

    >>> below("images/train", "a.jpg"), below(".", "a.jpg")
    ('images/train/a.jpg', 'a.jpg')
    """
    return (PurePosixPath(folder) / name).as_posix()


def folder_splits(
    names: Sequence[str], folder: Path, findings: Findings
) -> tuple[list[str] | None, list[str]]:
    """(split of each file, paths without the folder of the split).

    That is the first folder in the path that is named like a split; None if no path has one. If only some files
    are in such a folder, that is a problem.

    >>> folder_splits(["images/train/x/a.jpg", "images/val/b.jpg"], Path(), Findings())
    (['train', 'validation'], ['images/x/a.jpg', 'images/b.jpg'])
    """
    splits, inner = [], []
    for name in names:
        parts = name.split("/")
        at = next((at for at, part in enumerate(parts[:-1]) if split_named(part)), None)
        splits.append(None if at is None else split_named(parts.pop(at)))
        inner.append("/".join(parts))
    outside = [name for name, split in zip(names, splits, strict=True) if split is None]
    if len(outside) == len(names):
        return None, inner
    if outside:
        count = "an image is" if len(outside) == 1 else f"{len(outside):,} images are"
        what = f"{count} in no split, while others are: {listed(outside)}"
        findings.add_whole(folder, what, "move them to a folder train, val or test")
    return [split or "train" for split in splits], inner


def read_sizes(scan: Scan, stated: Sequence[Size | None], sources: Sequence[str]) -> list[Size | None]:
    """Sets and returns `scan.sizes`: (width, height) of each stored image; None if the file or size is wrong.

    Both are problems. `stated` are the sizes that the annotations state, `sources` where they do. Photographs with a
    tag that turns them are noted, unless their stated size shows that they are annotated as stored: boxes are read
    as pixels of the stored image, and some tools draw on the turned one.
    """
    scan.headers = probe_all(scan.folder, scan.names, scan.findings, full=scan.full)
    scan.sizes = stored_sizes(scan.headers)
    tagged = []
    for row, (name, size, wanted) in enumerate(zip(scan.names, scan.sizes, stated, strict=True)):
        if size is None:
            continue
        if wanted is not None and size != wanted:
            stated_size = f"the stated size is {wanted[0]} x {wanted[1]} pixels"
            hint = "annotate the image as it is stored"
            if size == (wanted[1], wanted[0]):
                hint = "store the image turned as it was annotated, without the EXIF tag that turns it"
            what = f"{stated_size}, and the image is {size[0]} x {size[1]}: '{name}'"
            scan.findings.add(sources[row], what, hint)
            scan.sizes[row] = None
        elif Path(name).suffix.lower() in _TAGGED:
            ambiguous = _TURNED if wanted is None or wanted[0] == wanted[1] else _TURNED_SAME_SIZE
            if orientation_of(scan.folder / name) in ambiguous:
                tagged.append(name)
    if tagged:
        scan.notes.append(
            f"{len(tagged):,} images have a tag that turns them; boxes are read as pixels of the stored image: "
            f"{listed(tagged)}"
        )
    return scan.sizes


def complete(
    scan: Scan,
    raw: Sequence[RawBoxes],
    labels: Mapping[str | int, int],
    *,
    records: Mapping[str, Sequence[Any]] | None = None,
    inner: Sequence[str] | None = None,
) -> None:
    """Adds the checked boxes to the scan, and what the table and the paths say of the images.

    Args:
        scan: with names, classes, sizes (None if an image is faulty), and the splits of the folders, if any. A
            table's splits replace these.
        raw: the objects as written in the files, in parts: the images of each part come after those of the last.
        labels: the label of each class that the files may name.
        records, inner: as in `describe`.
    """
    assert scan.sizes is not None
    faulty, scan.bad = scan.bad | {row for row, size in enumerate(scan.sizes) if size is None}, set()
    sizes = np.array([size or (0, 0) for size in scan.sizes], np.int64).reshape(-1, 2)
    checked = [check_boxes(part, sizes, labels, scan.findings) for part in raw]
    boxes, classes, images = map(np.concatenate, zip(*checked, strict=True))
    scan.boxes = Boxes(boxes, classes, np.searchsorted(images, np.arange(len(sizes) + 1)))
    describe(scan, records=records, inner=inner)
    scan.bad |= faulty
    rows = scan.rows()
    if rows and not len(scan.findings) and not any(len(scan.boxes.labels_of(row)) for row in rows):
        hint = "check the format, and the place of the annotations"
        scan.findings.add_whole(scan.folder, f"none of the {len(rows):,} images has an object", hint)
