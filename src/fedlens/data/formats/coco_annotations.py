"""The annotations of a COCO file as columns, read in batches: a file may have millions of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TextIO, TypeGuard

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

_KEYS = frozenset({int, str})
_NUMBERS = frozenset({int, float})
_LARGEST = 2.0**63  # a whole number in JSON may be larger than any float

Key = int | str | tuple[str]
"""An id; a tuple with the text of a value that cannot be one, and so is no id of an image or a category."""

Fault = tuple[str, str, str]
"""(place in the file, problem, hint)."""

Batches = Iterator[list[Any]]
"""The entries of a list, some at a time."""

_WINDOW = 1 << 20  # characters of the file in memory, unless one value has more
_CUTS = 4  # ends of objects that are tried as the end of a batch; an entry may contain objects
_SMALLEST = 1 << 12  # characters of a batch, below which entries are read one by one
_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


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


def read_lists(file: TextIO, lists: Mapping[str, Callable[[Batches], Any]]) -> dict[str, Any]:
    """The JSON object in a file, in which the lists named in `lists` are replaced by what these functions return.

    A function gets the entries of its list in batches, and has to read all of them. Of a key that occurs twice, the
    last value counts, as for `json.loads`.

    Raises `ValueError` or `RecursionError` if the file is not valid JSON, or not an object.

    >>> import io
    >>> read_lists(io.StringIO('{"a": [1, 2, 3], "b": [4]}'), {"a": lambda batches: sum(map(len, batches))})
    {'a': 3, 'b': [4]}
    """
    window, content = _Window(file), dict[str, Any]()
    window.expect("{")
    more = window.next() != "}"
    while more:
        key = window.value()
        if not isinstance(key, str):
            raise ValueError("a key is not a text")
        window.expect(":")
        long = key in lists and window.next() == "["
        content[key] = lists[key](window.batches()) if long else window.value()
        more = window.comma()
    window.expect("}")
    if window.next():
        raise ValueError("the file goes on after the object")
    return content


class _Window:
    """A part of the text of a file, from the position on that is read next."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0
        self._single = 0  # characters that are still to be read entry by entry

    def next(self) -> str:
        """The next character that is not white space, which is left there; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text) or not self._read_on():
                return self._text[self._at : self._at + 1]

    def expect(self, mark: str) -> None:
        """Goes beyond the next character. Raises `ValueError` if it is another one than `mark`."""
        if self.next() != mark:
            raise ValueError(f"there is no {mark}")
        self._at += 1

    def value(self) -> Any:
        """The next value. Raises `ValueError` if there is none."""
        self.next()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except ValueError:  # it is wrong, or goes on beyond the window
                if self._read_on():
                    continue
                raise ValueError("there is no value") from None
            if end == len(self._text) and self._read_on():  # a number may go on
                continue
            self._single -= end - self._at
            self._at = end
            return value

    def batches(self) -> Batches:
        """The entries of the next value, a list."""
        self.expect("[")
        more = self.next() != "]"
        while more:
            batch = self._batch()
            if batch:
                more = self.comma()
            self._single = 0 if batch else _WINDOW
            while more and self._single > 0:
                batch.append(self.value())
                more = self.comma()
            yield batch
        self.expect("]")

    def comma(self) -> bool:
        """Goes beyond the next character if it is a comma, and returns whether it is."""
        comma = self.next() == ","
        self._at += comma
        return comma

    def _batch(self) -> list[Any]:
        """The entries up to the end of an object near the end of the window; empty if no such end is found.

        pydantic's parser reads a list in half of the time of Python's. It refuses lone surrogates, which Python's
        accepts. Where it fails, the next entries are read one by one, so that the work stays proportional to the file.
        """
        if len(self._text) - self._at < _WINDOW:
            self._read_on()
        size = len(self._text) - self._at
        while size >= _SMALLEST:
            end = self._at + size
            for _ in range(_CUTS):
                end = self._text.rfind("}", self._at, end)
                if end < 0:
                    break
                try:
                    batch: list[Any] = from_json(f"[{self._text[self._at : end + 1]}]", cache_strings="keys")
                except ValueError:
                    continue
                self._at = end + 1
                return batch
            size //= 2
        return []

    def _read_on(self) -> bool:
        """Reads more of the file, as much as a value that is incomplete has so far; False at the end of the file."""
        rest = self._text[self._at :]
        more = self._file.read(max(_WINDOW, len(rest)))
        self._text, self._at = rest + more, 0
        return bool(more)
