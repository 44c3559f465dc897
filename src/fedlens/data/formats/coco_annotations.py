"""The annotations of a COCO file as columns: a file may have millions of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedlens.data.formats.json_lists import Batches

_KEYS = frozenset({int, str})
_NUMBERS = frozenset({int, float})
_LARGEST = 2.0**63  # a whole number in JSON may be larger than any float

Key = int | str | tuple[str]
"""An id; a tuple with the text of a value that cannot be one, and so is no id of an image or a category."""

Fault = tuple[str, str, str]
"""(place in the file, problem, hint)."""


@dataclass
class CocoAnnotations:
    """The annotations with an id, m of them, in the order of the file.

    Args:
        ids: [m], as int64, or as objects if they are not all numbers of 64 bits.
        numbers: int32 [m], the place of each in the list, from 1 on.
        images: int32 [m], the image of each, a position in `image_ids`.
        categories: int32 [m], the class of each, a position in `category_ids`.
        boxes: float64 [m, 4], x, y, width, height; NaN if `malformed` has the position.
        crowds: bool [m], whether the box is around many objects (`iscrowd`).
        image_ids: the ids of images that occur.
        category_ids: the ids of categories that occur.
        malformed: the text of each `bbox` that is not four numbers, by position; None if there is none.
        faults: the annotations without an id.
    """

    ids: NDArray[Any]
    numbers: NDArray[np.int32]
    images: NDArray[np.int32]
    categories: NDArray[np.int32]
    boxes: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    image_ids: Sequence[Key]
    category_ids: Sequence[Key]
    malformed: dict[int, str | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, at: int) -> str:
        """The place in the file of the annotation at a position, by its id."""
        return f"annotation {self.ids[at]}"

    def repeated(self) -> dict[int, int]:
        """The positions of annotations whose id an earlier one has, and the position of the first of these."""
        if self.ids.dtype != object:
            ascending = np.sort(self.ids)
            if (ascending[1:] != ascending[:-1]).all():
                return {}
        first: dict[Any, int] = {}
        return {at: first[key] for at, key in enumerate(self.ids.tolist()) if first.setdefault(key, at) != at}


def read_annotations(batches: Batches) -> CocoAnnotations:
    """The annotations in a list, each of which has to be an object.

    >>> found = read_annotations(iter([[{"id": 7, "image_id": 1, "category_id": 3, "bbox": [1, 2, 3, 4]}], [{}]]))
    >>> found.where(0), found.boxes.tolist(), found.faults[0][:2]
    ('annotation 7', [[1.0, 2.0, 3.0, 4.0]], ('annotation number 2', 'its id is missing'))
    """
    columns = _Columns()
    for batch in batches:
        columns.add(batch)
    return CocoAnnotations(
        np.concatenate(columns.ids),
        np.frombuffer(columns.numbers, np.int32),
        np.frombuffer(columns.images, np.int32),
        np.frombuffer(columns.categories, np.int32),
        np.frombuffer(columns.boxes, np.float64).reshape(-1, 4),
        np.frombuffer(columns.crowds, bool),
        list(columns.image_codes),
        list(columns.category_codes),
        columns.malformed,
        columns.faults,
    )


@dataclass
class _Columns:
    """Collects annotations, a batch at a time.

    A column is the bytes of an array, which grow in place: parts to be joined at the end need twice the memory.
    """

    ids: list[NDArray[Any]] = field(default_factory=lambda: [np.zeros(0, np.int64)])
    numbers: bytearray = field(default_factory=bytearray)
    images: bytearray = field(default_factory=bytearray)
    categories: bytearray = field(default_factory=bytearray)
    boxes: bytearray = field(default_factory=bytearray)
    crowds: bytearray = field(default_factory=bytearray)
    image_codes: dict[Key, int] = field(default_factory=dict)
    category_codes: dict[Key, int] = field(default_factory=dict)
    malformed: dict[int, str | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    entries: int = 0
    length: int = 0

    def add(self, entries: list[dict[str, Any]]) -> None:
        """Adds the entries of a batch."""
        numbers = np.arange(self.entries + 1, self.entries + len(entries) + 1, dtype=np.int32)
        self.entries += len(entries)
        ids = [entry.get("id") for entry in entries]
        if not _KEYS.issuperset(map(type, ids)):
            for number, key in zip(numbers.tolist(), ids, strict=True):
                if not is_key(key):
                    hint = "give each annotation a number as its id"
                    self.faults.append((f"annotation number {number}", f"its id is {shown(key)}", hint))
            valid = [at for at, key in enumerate(ids) if is_key(key)]
            entries, ids, numbers = [entries[at] for at in valid], [ids[at] for at in valid], numbers[valid]
        self.ids.append(_ids(ids))
        self.numbers += numbers.data
        self.images += _codes([entry.get("image_id") for entry in entries], self.image_codes)
        self.categories += _codes([entry.get("category_id") for entry in entries], self.category_codes)
        self.boxes += self._boxes([entry.get("bbox") for entry in entries]).data
        self.crowds += bytes(entry.get("iscrowd") == 1 for entry in entries)
        self.length += len(entries)

    def _boxes(self, values: list[Any]) -> NDArray[np.float64]:
        """float64 [n, 4]: the boxes; the position and text of each that is not four numbers are kept."""
        lists = set(map(type, values)) == {list} and set(map(len, values)) == {4}
        if lists and _NUMBERS.issuperset(map(type, chain.from_iterable(values))):
            with suppress(OverflowError):
                boxes = np.array(values, np.float64)
                if (np.abs(boxes) < _LARGEST).all():
                    return boxes
        for at, value in enumerate(values):
            if not isinstance(value, list) or len(value) != 4 or not all(map(_is_number, value)):
                self.malformed[self.length + at] = None if value is None else shown(value)
                values[at] = [math.nan] * 4
        return np.array(values, np.float64).reshape(-1, 4)


def _ids(ids: list[Any]) -> NDArray[Any]:
    if set(map(type, ids)) <= {int}:  # NumPy would read texts as numbers
        with suppress(OverflowError):
            return np.array(ids, np.int64)
    return np.array(ids, object)


def _codes(values: list[Any], codes: dict[Key, int]) -> memoryview:
    """int32 [n]: the position of each value among the different ones, to which new ones are added."""
    if not _KEYS.issuperset(map(type, values)):
        values = [value if is_key(value) else (shown(value),) for value in values]
    return np.array([codes.setdefault(value, len(codes)) for value in values], np.int32).data


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_key(value: object) -> TypeGuard[int | str]:
    """Whether a value can be an id: a whole number or a text."""
    return is_whole(value) or isinstance(value, str)


def shown(value: object) -> str:
    """A value as it is written in JSON, shortened; for messages."""
    text = "missing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (is_whole(value) and abs(value) < _LARGEST)
