"""Reads a JSON object with long lists a batch of entries at a time, so that no list is in memory as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from pydantic_core import from_json

Batches = Iterator[list[Any]]
"""The entries of a list, some at a time."""

_WINDOW = 1 << 20  # characters of the file in memory, unless one value has more
_CUTS = 4  # ends of objects that are tried as the end of a batch; an entry may contain objects
_SMALLEST = 1 << 12  # characters of a batch, below which entries are read one by one
_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


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
