"""Finds the line of every key of a TOML text, also of quoted keys and in inline tables."""

from __future__ import annotations

import re
from bisect import bisect_right

Path = tuple[str | int, ...]
"""Keys from the outermost table inwards; a number is the place in a list, from 0."""

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'"
_KEY = re.compile(rf"[A-Za-z0-9_-]+|{_STRING}")
_VALUE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' + rf"'''.*?'{{3,5}}|{_STRING}|" + r"[^,\]}#\r\n]*", re.DOTALL
)


def key_lines(text: str) -> dict[str, int]:
    """The same as `toml_lines`, by dotted key.

    >>> key_lines('rounds = 3\\n[data.partition]\\nname = "iid"')
    {'rounds': 1, 'data': 2, 'data.partition': 2, 'data.partition.name': 3}
    """
    lines: dict[str, int] = {}
    for path, line in toml_lines(text).items():
        lines.setdefault(".".join(map(str, path)), line)
    return lines


def toml_lines(text: str) -> dict[Path, int]:
    """The first line, from 1, of each table, key and list entry. `text` must be valid TOML.

    >>> toml_lines('[grid]\\n"local.lr" = [0.1,\\n  0.3]\\n[[tables]]\\nkind = "summary"')[("grid", "local.lr", 1)]
    3
    >>> toml_lines('[cases."two classes"]\\nset = { rounds = 3 }')[("cases", "two classes", "set", "rounds")]
    2
    """
    return _Scanner(text).lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[Path, int] = {}
        self._starts = [match.end() for match in re.finditer("\n", text)]  # of lines 2, 3, ...
        self._counts: dict[Path, int] = {}  # entries so far of each list of tables
        table: Path = ()
        self._take(_SPACE)
        while self.at < len(text):
            if text[self.at] == "[":
                table = self._header(2 if text.startswith("[[", self.at) else 1)
            else:
                self._pair(table)
            self._take(_SPACE)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match[0]

    def _mark(self, path: Path, at: int) -> None:
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], bisect_right(self._starts, at) + 1)

    def _header(self, brackets: int) -> Path:
        start = self.at
        keys = self._keys(brackets)
        path: Path = ()
        for number, key in enumerate(keys, 1):
            path = (*path, key)
            if brackets == 2 and number == len(keys):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
        self._mark(path, start)
        self.at += brackets
        return path

    def _pair(self, table: Path) -> None:
        start = self.at
        path = (*table, *self._keys(0))
        self._mark(path, start)
        self.at += 1  # behind "="
        self._take(_SPACE)
        self._value(path)

    def _keys(self, before: int) -> list[str]:
        """A dotted key behind some signs, and the space behind it."""
        keys: list[str] = []
        while not keys or self.text[self.at] == ".":
            self.at += 1 if keys else before
            self._take(_SPACE)
            keys.append(_unquoted(self._take(_KEY)))
            self._take(_SPACE)
        return keys

    def _value(self, path: Path) -> None:
        first = self.text[self.at]
        if first not in "[{":
            self._take(_VALUE)
            return
        self.at += 1
        number = 0
        self._take(_SPACE)
        while self.text[self.at] not in "]}":
            if self.text[self.at] == ",":
                self.at += 1
            elif first == "{":
                self._pair(path)
            else:
                self._mark((*path, number), self.at)
                self._value((*path, number))
                number += 1
            self._take(_SPACE)
        self.at += 1


def _unquoted(key: str) -> str:
    if key[0] not in "\"'":
        return key
    import tomllib  # which knows every escape

    return next(iter(tomllib.loads(f"{key} = 0")))
