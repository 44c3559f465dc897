"""Completes the scan of a detection dataset and checks its objects: the part that COCO, VOC and YOLO share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import nearest
from fedlens.base.summary_text import listed
from fedlens.data.boxes import Boxes
from fedlens.data.decoding import orientation_of
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.clients import describe
from fedlens.data.formats.folder_listing import stem
from fedlens.data.formats.probe import probe_all, stored_sizes
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named

Corners = tuple[float, float, float, float]
_LISTED = 12  # classes that a sentence names
_BLOCK = 1 << 16  # objects that are computed with at once
_FACTOR = np.uint64(6364136223846793005)  # of Knuth's linear congruential generator MMIX
_AGAIN = "draw it again, or remove the object"

Size = tuple[int, int]
_TURNED = range(2, 9)  # values of the EXIF tag "Orientation" except 1, upright
_TURNED_SAME_SIZE = range(2, 5)  # of these, mirrored or turned by 180 degrees
_TAGGED = (".jpg", ".jpeg", ".tif", ".tiff", ".webp")  # photographs that may have the tag


@dataclass(frozen=True, slots=True)
class RawBox:
    """One object as written in a file, before it is checked.

    Args:
        where: the file, and the line or id in it.
        category: the name or number of its class in the file.
        corners: left, top, right, bottom: edges in pixels of the image file, counted from 0.
        written: the numbers as they are in the file, for messages.
    """

    where: str
    category: str | int
    corners: Corners
    written: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class RawBoxes:
    """The m objects of many images as written in files, before they are checked: a column for each property.

    Args:
        rows: int [m], the image of each.
        categories: int [m], the class of each, a position in `names`.
        names: the names or numbers of classes in the files.
        corners: float64 [m, 4], left, top, right, bottom: edges in pixels of the image file, counted from 0.
        where: the file, and the line or id in it, of the object at a position; for messages.
        written: the numbers of the object at a position as they are in the file, for messages.
    """

    rows: NDArray[np.integer]
    categories: NDArray[np.integer]
    names: Sequence[str | int]
    corners: NDArray[np.float64]
    where: Callable[[int], str]
    written: Callable[[int], Iterable[object]]

    @classmethod
    def of(cls, images: Iterable[Iterable[RawBox]]) -> RawBoxes:
        """The objects of images that are read one by one, in the order of the images.

        >>> box = RawBox("a.txt, line 1", "cat", (1.0, 2.0, 5.0, 6.0), (1, 2, 5, 6))
        >>> RawBoxes.of([[], [box]]).rows.tolist()
        [1]
        """
        boxes, rows, codes = list[RawBox](), list[int](), dict[str | int, int]()
        for row, of_image in enumerate(images):
            boxes += of_image
            rows += [row] * (len(boxes) - len(rows))
        return cls(
            np.array(rows, np.int64),
            np.array([codes.setdefault(box.category, len(codes)) for box in boxes], np.int64),
            list(codes),
            np.array([box.corners for box in boxes], np.float64).reshape(-1, 4),
            lambda at: boxes[at].where,
            lambda at: boxes[at].written,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self, labels: Mapping[str | int, int]) -> NDArray[np.int64]:
        """int64 [m]: the label of each, given that of each class; -1 if its class is unknown."""
        of_names = np.array([labels.get(name, -1) for name in self.names], np.int64)
        of_objects: NDArray[np.int64] = of_names[self.categories]
        return of_objects

    def published_labels(self, labels: Mapping[str | int, int], findings: Findings) -> NDArray[np.int64]:
        """int64 [m]: as `labels`, for boxes that are delivered as published, even outside the image or twice.

        Of the problems that `check_boxes` reports, an unknown class and a number that is not finite are added to
        `findings`.

        >>> findings = Findings(remedy="download it again")
        >>> box = RawBox("a.txt, line 1", "cta", (1.0, 2.0, 5.0, 6.0), (1, 2, 5, 6))
        >>> RawBoxes.of([[box]]).published_labels({"cat": 0}, findings).tolist(), findings.found[0].what
        ([-1], "its class 'cta' is unknown (did you mean 'cat')")
        """
        known = self.labels(labels)
        for at in np.flatnonzero((known < 0) | ~np.isfinite(self.corners).all(axis=1)).tolist():
            name = self.names[self.categories[at]]
            what = f"its box {_numbers(self.written(at))} has a number that is not finite"
            if known[at] < 0:
                what = f"its class {_quoted(name)} is unknown ({unknown(name, labels)})"
            findings.add(self.where(at), what)
        return known


def check_boxes(
    raw: RawBoxes, sizes: NDArray[np.int64], labels: Mapping[str | int, int], findings: Findings
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.integer]]:
    """(boxes float32 [k, 4], labels int64 [k], rows int [k]): the valid objects, sorted by image.

    A box is left, top, right, bottom in pixels of its image file, whose width and height are in `sizes`, int64 [n, 2].
    Boxes of an image of size 0 x 0, which cannot be read, are left out. Each of these is a problem:

    | problem | with `on_error = "skip"` |
    |---|---|
    | a class that is not in `labels` | the object is left out |
    | a number that is not finite | the object is left out |
    | no area: right <= left or bottom <= top | the object is left out |
    | wholly outside the image | the object is left out |
    | a pixel or more outside the image | the box is cut off at the edge |
    | the same class and box a second time | the second is left out |

    Less than a pixel outside is a rounding error of tools that write shares of the width; it is cut off silently.

    >>> findings = Findings()
    >>> inside = RawBox("a.txt, line 1", "cat", (1.0, 2.0, 5.0, 6.0), (1, 2, 5, 6))
    >>> over = RawBox("a.txt, line 2", "cat", (4.0, 4.0, 12.0, 6.0), (4, 4, 12, 6))
    >>> boxes, labels, rows = check_boxes(RawBoxes.of([[inside, over]]), np.array([[8, 8]]), {"cat": 0}, findings)
    >>> boxes.tolist(), labels.tolist(), rows.tolist()
    ([[1.0, 2.0, 5.0, 6.0], [4.0, 4.0, 8.0, 6.0]], [0, 0], [0, 0])
    >>> [finding.what for finding in findings]
    ['its box 4, 4, 12, 6 extends 4 pixels beyond the image of 8x8']
    """
    readable = (sizes.min(axis=1, initial=1) > 0)[raw.rows]
    known = raw.labels(labels)
    kept, over = _cut_off(raw, sizes)
    usable = (known >= 0) & np.isfinite(kept).all(axis=1) & _have_area(kept)
    valid = _by_row(np.flatnonzero(usable & readable), raw.rows)
    repeated = valid[_repeated(raw, valid, known, kept, sizes)]
    twice = np.zeros(len(raw), bool)
    twice[repeated] = True
    for at in _by_row(np.flatnonzero(readable & (~usable | over | twice)), raw.rows).tolist():
        for problem in _problems(raw, at, sizes[raw.rows[at]], labels, bool(twice[at])):
            findings.add(raw.where(at), *problem)
    valid = valid[~twice[valid]]
    return kept[valid], known[valid], raw.rows[valid]


def _cut_off(raw: RawBoxes, sizes: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """(boxes float32 [m, 4], bool [m]): the boxes cut off at the edges, and which extend a pixel or more beyond.

    In single precision, as it is kept, a box far thinner than a pixel has no area.
    """
    kept, over = np.empty((len(raw), 4), np.float32), np.empty(len(raw), bool)
    for start in range(0, len(raw), _BLOCK):
        part = slice(start, start + _BLOCK)
        corners, edges = raw.corners[part], sizes[raw.rows[part]]
        with np.errstate(over="ignore", invalid="ignore"):
            kept[part] = _inside(corners, edges)
        kept[part][~np.isfinite(corners).all(axis=1)] = np.nan
        over[part] = _beyond(corners, edges) >= 1
    return kept, over


def _inside(corners: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.concatenate([np.maximum(corners[:, :2], 0), np.minimum(corners[:, 2:], edges)], axis=1)


def _beyond(corners: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """[k]: the pixels by which each box extends beyond its image; negative inside."""
    farthest: NDArray[np.float64] = np.maximum(-corners[:, :2], corners[:, 2:] - edges).max(axis=1)
    return farthest


def _repeated(
    raw: RawBoxes,
    valid: NDArray[np.int64],
    labels: NDArray[np.int64],
    kept: NDArray[np.float32],
    sizes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The positions in `valid` of boxes that repeat an earlier one of the same image and class."""
    hashed = raw.rows[valid].astype(np.uint64)
    # + 0.0: -0.0 has other bits, and is equal.
    for column in (labels[valid], *(kept[valid] + 0.0).view(np.uint32).T):
        hashed = hashed * _FACTOR + column.astype(np.uint64)
    # Equal boxes have equal hashes. So only the few that share one are compared, in double precision.
    near = _shared(hashed)
    at = valid[near]
    keys = [labels[at], *_inside(raw.corners[at], sizes[raw.rows[at]]).T, raw.rows[at]]
    order = np.lexsort(keys)  # it is stable: equal boxes stay in their order
    same = np.ones(max(0, len(at) - 1), bool)
    for key in keys:
        same &= key[order[1:]] == key[order[:-1]]
    return near[order[1:][same]]


def _shared(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The positions, ascending, of values that occur more than once."""
    order = np.argsort(values)
    same = values[order[1:]] == values[order[:-1]]
    shared = np.zeros(len(values), bool)
    shared[order[1:][same]] = shared[order[:-1][same]] = True
    return np.flatnonzero(shared)


def _problems(
    raw: RawBoxes, at: int, size: NDArray[np.int64], labels: Mapping[str | int, int], twice: bool
) -> Iterator[tuple[str, str]]:
    """(problem, hint) of each problem of the object at a position."""
    name, corners = raw.names[raw.categories[at]], raw.corners[at : at + 1]
    numbers, pixels = _numbers(raw.written(at)), f"{size[0]}x{size[1]}"
    inside, beyond = _inside(corners, size), float(_beyond(corners, size)[0])
    if name not in labels:
        yield f"its class {_quoted(name)} is unknown", unknown(name, labels)
    elif not np.isfinite(corners).all():
        yield f"its box {numbers} has a number that is not finite", _AGAIN
    elif _have_area(corners).all() and not _have_area(inside).all():
        yield f"its box {numbers} is outside the image of {pixels}", "correct it, or remove the object"
    elif not _have_area(inside.astype(np.float32)).all():
        yield f"its box {numbers} has no area", _AGAIN
    elif beyond >= 1:
        what = f"its box {numbers} extends {beyond:.6g} pixel{'' if beyond == 1 else 's'} beyond the image of {pixels}"
        yield what, "correct it, or skip errors to cut it off at the edge"
    if twice:
        yield f"its box {numbers} is there twice, with the same class", "remove one of the two"


def _by_row(positions: NDArray[np.int64], rows: NDArray[np.integer]) -> NDArray[np.int64]:
    return positions[np.argsort(rows[positions], kind="stable")]


def _have_area(boxes: NDArray[np.floating]) -> NDArray[np.bool_]:
    """bool [k]: which of the boxes [k, 4] have an area."""
    area: NDArray[np.bool_] = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
    return area


def unknown(category: str | int, known: Iterable[str | int]) -> str:
    """A hint for a class that is not among the known ones.

    >>> unknown("dgo", ["cat", "dog"]), unknown(3, [1, 2])
    ("did you mean 'dog'", 'known: 1, 2')
    """
    names = list(known)
    if not names:
        return "no class is known"
    if isinstance(category, str):
        hint = nearest(category, map(str, names))
        if len(names) <= _LISTED or hint.startswith("did"):
            return hint
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known: {', '.join(map(str, names[:_LISTED]))}{more}"


def _quoted(category: str | int) -> str:
    return f"'{category}'" if isinstance(category, str) else str(category)


def _numbers(written: Iterable[object]) -> str:
    return ", ".join(f"{n:g}" if isinstance(n, float) else str(n) for n in written)


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
