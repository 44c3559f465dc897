"""Checks the annotated objects of an image: the same for every format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import nearest
from fedlens.data.diagnostics import Findings

Corners = tuple[float, float, float, float]
_LISTED = 12  # classes that a sentence names


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


def check_boxes(
    raw: Iterable[RawBox], width: int, height: int, labels: Mapping[str | int, int], findings: Findings
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(boxes float32 [k, 4], labels int64 [k]): the valid objects of one image.

    A box is left, top, right, bottom in pixels of the image file, which is `width` x `height`. Each of these is a
    problem:

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
    >>> boxes, labels = check_boxes([inside, over], 8, 8, {"cat": 0}, findings)
    >>> boxes.tolist(), labels.tolist()
    ([[1.0, 2.0, 5.0, 6.0], [4.0, 4.0, 8.0, 6.0]], [0, 0])
    >>> [finding.what for finding in findings]
    ['its box 4, 4, 12, 6 extends 4 pixels beyond the image of 8x8']
    """
    kept: dict[tuple[int, Corners], None] = {}
    for box in raw:
        label = labels.get(box.category)
        if label is None:
            category = f"'{box.category}'" if isinstance(box.category, str) else box.category
            problem = f"its class {category} is unknown", unknown(box.category, labels)
        elif (fault := _fault(box, width, height)) is not None:
            problem = fault
        else:
            _check_edges(box, width, height, findings)
            corners = _inside(box.corners, width, height)
            if (label, corners) not in kept:
                kept[label, corners] = None
                continue
            problem = f"its box {_numbers(box)} is there twice, with the same class", "remove one of the two"
        findings.add(box.where, *problem)
    return (
        np.array([corners for _, corners in kept], np.float32).reshape(-1, 4),
        np.array([label for label, _ in kept], np.int64),
    )


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


def _fault(box: RawBox, width: int, height: int) -> tuple[str, str] | None:
    """(problem, hint) of a box that cannot be used."""
    numbers, hint = _numbers(box), "draw it again, or remove the object"
    if not all(map(math.isfinite, box.corners)):
        return f"its box {numbers} has a number that is not finite", hint
    inside = _inside(box.corners, width, height)
    if _has_area(box.corners) and not _has_area(inside):
        what = f"its box {numbers} is outside the image of {width}x{height}"
        return what, "correct it, or remove the object"
    # In single precision, as it is kept: a box far thinner than a pixel has no area then.
    left, top, right, bottom = np.array(inside, np.float32).tolist()
    return None if _has_area((left, top, right, bottom)) else (f"its box {numbers} has no area", hint)


def _has_area(corners: Corners) -> bool:
    left, top, right, bottom = corners
    return right > left and bottom > top


def _check_edges(box: RawBox, width: int, height: int, findings: Findings) -> None:
    """Adds a problem if the box extends a pixel or more beyond the image."""
    left, top, right, bottom = box.corners
    over = max(-left, -top, right - width, bottom - height)
    if over >= 1:
        pixels = f"{over:.6g} pixel{'' if over == 1 else 's'}"
        what = f"its box {_numbers(box)} extends {pixels} beyond the image of {width}x{height}"
        findings.add(box.where, what, "correct it, or skip errors to cut it off at the edge")


def _inside(corners: Corners, width: int, height: int) -> Corners:
    left, top, right, bottom = corners
    return max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))


def _numbers(box: RawBox) -> str:
    return ", ".join(f"{n:g}" if isinstance(n, float) else str(n) for n in box.written)
