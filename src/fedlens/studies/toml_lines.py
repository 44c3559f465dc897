"""Finds the line of every key of a TOML text, also of quoted keys and in inline tables."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]
"""Keys from the outermost table inwards; a number is the place in a list, from 0."""

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\r\n]*")
_STRINGS = {
    '"""': re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    "'''": re.compile(r"'''.*?'{3,5}", re.DOTALL),
    '"': re.compile(r'"((?:[^"\\\n]|\\.)*)"'),
    "'": re.compile(r"'([^'\n]*)'"),
}


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
        self._counts: dict[Path, int] = {}  # entries so far of each list of tables
        self._counted, self._line = 0, 1  # newlines are counted once, up to here
        table: Path = ()
        self._skip()
        while self.at < len(text):
            if text.startswith("[[", self.at):
                table = self._header(2, many=True)
            elif text[self.at] == "[":
                table = self._header(1, many=False)
            else:
                self._pair(table)
            self._skip()

    def _skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _mark(self, path: Path) -> None:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self._line)

    def _header(self, brackets: int, many: bool) -> Path:
        start = self.at
        self.at += brackets
        keys = self._keys()
        end, self.at = self.at + brackets, start
        path: Path = ()
        for number, key in enumerate(keys, 1):
            path = (*path, key)
            if many and number == len(keys):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
        self._mark(path)
        self.at = end
        return path

    def _pair(self, table: Path) -> None:
        start = self.at
        path = (*table, *self._keys())
        end, self.at = self.at + 1, start  # behind "="
        self._mark(path)
        self.at = end
        self._skip()
        self._value(path)

    def _keys(self) -> list[str]:
        """A dotted key, and what stands before the next sign."""
        keys = []
        while True:
            self._skip()
            quote = self.text[self.at]
            match = _STRINGS.get(quote, _BARE).match(self.text, self.at)
            assert match is not None
            keys.append(_unquoted(match[0]))
            self.at = match.end()
            self._skip()
            if self.text[self.at] != ".":
                return keys
            self.at += 1

    def _value(self, path: Path) -> None:
        for quote, pattern in _STRINGS.items():
            if self.text.startswith(quote, self.at):
                match = pattern.match(self.text, self.at)
                break
        else:
            if self.text[self.at] in "[{":
                self._inner(path, "]" if self.text[self.at] == "[" else "}")
                return
            match = _SCALAR.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _inner(self, path: Path, end: str) -> None:
        """A list or an inline table."""
        self.at += 1
        number = 0
        self._skip()
        while self.text[self.at] != end:
            if self.text[self.at] == ",":
                self.at += 1
            elif end == "}":
                self._pair(path)
            else:
                self._mark((*path, number))
                self._value((*path, number))
                number += 1
            self._skip()
        self.at += 1


def _unquoted(key: str) -> str:
    if key.startswith("'"):
        return key[1:-1]
    if not key.startswith('"'):
        return key
    import tomllib  # which knows every escape

    return next(iter(tomllib.loads(f"{key} = 0")))
