"""One XML file of Pascal VOC: the objects on one image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fedlens.core.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.objects import RawBox
from fedlens.data.formats.xml_tree import Element, read_xml, text_of

_SIDES = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class VocAnnotation:
    """What the file of one image says: the file name and size it states, and its objects."""

    path: Path
    file: str | None
    size: tuple[int, int] | None
    objects: tuple[RawBox, ...]
    difficult: int


def read_annotation(path: Path, findings: Findings, first_pixel: int = 1) -> VocAnnotation | None:
    """What the file `path` says; None, and a finding, where it is no XML of that kind.

    VOC counts pixels from 1 and includes the last one: a box over the whole of a 640 x 480 image is 1, 1, 640,
    480. As edges counted from 0 (left, top, right, bottom) that is xmin - 1, ymin - 1, xmax, ymax: 0, 0, 640,
    480. With `first_pixel` 0 the numbers are such edges already and stay as they are.

    xmax = xmin would be an object one pixel wide in VOC's way of counting. It is a slip of the mouse in all
    data we have seen (BCCD has two), and taken for a box without area.
    """
    try:
        root = read_xml(path)
    except DataError as error:
        findings.add(error.where, error.what, error.hint)
        return None
    if root.tag != "annotation":
        what = f"it is a <{root.tag}>, and an <annotation> is wanted"
        findings.add(f"{path}, line {root.sourceline}", what, "export it in the format of Pascal VOC")
        return None
    objects = []
    difficult = 0
    for entry in root.findall("object"):
        found = _object(entry, path, first_pixel, findings)
        if found is not None:
            objects.append(found)
            difficult += text_of(entry, "difficult") == "1"
    return VocAnnotation(
        path, text_of(root, "filename"), _size(root, path, findings), tuple(objects), difficult
    )


def _object(entry: Element, path: Path, first_pixel: int, findings: Findings) -> RawBox | None:
    where = f"{path}, line {entry.sourceline}"
    name, box = text_of(entry, "name"), entry.find("bndbox")
    if not name:
        findings.add(where, "the object has no <name>", "name its class, or remove the object")
        return None
    if box is None:
        findings.add(where, f"the object '{name}' has no <bndbox>", "draw its box, or remove the object")
        return None
    texts = [text_of(box, side) for side in _SIDES]
    for side, text in zip(_SIDES, texts, strict=True):
        if text is None or _float(text) is None:
            what = f"<{side}> is missing" if text is None else f"<{side}> is '{text}', not a number"
            inner = box if text is None else box.find(side)
            findings.add(f"{path}, line {inner.sourceline}", what, "correct the number, or remove the object")
            return None
    xmin, ymin, xmax, ymax = (float(text) for text in texts if text is not None)
    away = first_pixel if xmax > xmin and ymax > ymin else 0
    return RawBox(
        f"{path}, line {box.sourceline}", name, (xmin - away, ymin - away, xmax, ymax), tuple(texts)
    )


def _size(root: Element, path: Path, findings: Findings) -> tuple[int, int] | None:
    """(width, height) where the file states them. That they are missing is no fault: the image has them."""
    size = root.find("size")
    if size is None:
        return None
    sides = []
    for side in ("width", "height"):
        text = text_of(size, side)
        number = None if text is None else _float(text)
        if number is None or number < 1 or number != int(number):
            what = f"<{side}> is missing" if text is None else f"<{side}> is '{text}'"
            inner = size if text is None else size.find(side)
            hint = "write the pixels of the image, or remove <size>"
            findings.add(f"{path}, line {inner.sourceline}", what, hint)
            return None
        sides.append(int(number))
    return sides[0], sides[1]


def _float(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
