"""One XML file of Pascal VOC: the objects on one image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.objects import RawBox
from fedlens.data.formats.xml_tree import Element, read_xml, text_of

_SIDES = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class VocAnnotation:
    """The contents of one file: the file name and size of the image that it states, and its objects."""

    path: Path
    file: str | None
    size: tuple[int, int] | None
    objects: tuple[RawBox, ...]
    difficult: int


def read_annotation(path: Path, findings: Findings, first_pixel: int = 1) -> VocAnnotation | None:
    """The contents of the file `path`; None, and a problem, if it is not such an XML file.

    VOC counts pixels from 1 and includes the last one: a box around all of a 640 x 480 image is 1, 1, 640, 480. As
    edges counted from 0 (left, top, right, bottom) that is xmin - 1, ymin - 1, xmax, ymax: 0, 0, 640, 480. With
    `first_pixel` 0 the numbers are such edges already and stay as they are.

    xmax = xmin would be an object one pixel wide in VOC's way of counting. In all data that we have seen it is a slip
    of the mouse (BCCD has two), so it is read as a box without area.
    """
    root = findings.attempt(read_xml, path)
    if root is None:
        return None
    if root.tag != "annotation":
        what = f"the root element is <{root.tag}>, not <annotation>"
        findings.add(f"{path}, line {root.sourceline}", what, "export it in the format of Pascal VOC")
        return None
    objects, difficult = [], 0
    for entry in root.findall("object"):
        box = findings.attempt(_object, entry, path, first_pixel)
        if box is not None:
            objects.append(box)
            difficult += text_of(entry, "difficult") == "1"
    size = findings.attempt(_size, root, path)
    return VocAnnotation(path, text_of(root, "filename"), size, tuple(objects), difficult)


def _object(entry: Element, path: Path, first_pixel: int) -> RawBox:
    """One object. Raises `DataError` if its name or box is missing or wrong."""
    where = f"{path}, line {entry.sourceline}"
    name, box = text_of(entry, "name"), entry.find("bndbox")
    if not name:
        raise DataError("the object has no <name>", where=where, hint="name its class, or remove the object")
    if box is None:
        hint = "draw its box, or remove the object"
        raise DataError(f"the object '{name}' has no <bndbox>", where=where, hint=hint)
    hint = "correct the number, or remove the object"
    xmin, ymin, xmax, ymax = (_number(box, side, path, hint) for side in _SIDES)
    away = first_pixel if xmax > xmin and ymax > ymin else 0
    written = tuple(text_of(box, side) for side in _SIDES)
    return RawBox(f"{path}, line {box.sourceline}", name, (xmin - away, ymin - away, xmax, ymax), written)


def _size(root: Element, path: Path) -> tuple[int, int] | None:
    """(width, height), if the file states them. Raises `DataError` if they are not whole numbers of pixels."""
    size = root.find("size")
    if size is None:
        return None
    hint = "write the pixels of the image, or remove <size>"
    width, height = (_number(size, side, path, hint, least=1) for side in ("width", "height"))
    return int(width), int(height)


def _number(parent: Element, tag: str, path: Path, hint: str, least: int | None = None) -> float:
    """The number in the child `tag`; with `least`, a whole number from there on. Raises `DataError` if it is none."""
    text = text_of(parent, tag)
    if text is None:
        raise DataError(f"<{tag}> is missing", where=f"{path}, line {parent.sourceline}", hint=hint)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isfinite(number) and (least is None or (number >= least and number == int(number))):
        return number
    wanted = "a number" if least is None else f"a whole number from {least} on"
    where = f"{path}, line {parent.find(tag).sourceline}"
    raise DataError(f"<{tag}> is '{text}', not {wanted}", where=where, hint=hint)
