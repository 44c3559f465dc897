"""Reads CSV tables of several dialects, and reports problems line by line."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlens.core.errors import nearest
from fedlens.data.diagnostics import Findings

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ABSOLUTE = re.compile(r"/|[A-Za-z]:|~")


@dataclass(frozen=True)
class CsvTable:
    """The lines of a table, each with a cell for each column; cells are stripped of white space.

    Args:
        path: the file.
        columns: the names in its first line.
        rows: the cells, line after line.
        lines: the number of the line in the file at which each row begins, from 1 on.
        notes: sentences on what is unusual about it.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[str]:
        """Every row's cell in a column. Raises `ValueError` where there is no such column."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def where(self, row: int) -> str:
        """Where a person finds this row."""
        return f"{self.path}, line {self.lines[row]}"


def read_csv(path: Path, findings: Findings, needed: Sequence[str] = ("path",)) -> CsvTable | None:
    """The table in a file; None where there is none to be had, for reasons that are added to `findings`.

    UTF-8 is read with and without a byte-order mark; cells are separated by commas, semicolons or tabs, of
    which the first line has most. A cell may be quoted, and hold line breaks then. Empty lines are passed over.

    Found and left out: a line with too many or too few cells. Found and the whole table given up: another
    encoding, a quote that is not closed, no line at all, two columns of one name, a column of `needed` that
    is missing.
    """
    text = _text(path, findings)
    if text is None:
        return None
    bare = text.removeprefix("\ufeff")
    delimiter = _delimiter(bare)
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    reader = csv.reader(io.StringIO(bare, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            row = tuple(cell.strip() for cell in cells)
            if any(row):
                if not columns:
                    columns = row
                elif len(row) == len(columns):
                    rows.append(row)
                    lines.append(line)
                else:
                    what = f"the line has {len(row)} cells, and the first line has {len(columns)}"
                    findings.add(f"{path}, line {line}", what, f"quote cells that hold {_named(delimiter)}")
            line = reader.line_num + 1
    except csv.Error as error:
        what = f"from here on the table cannot be read: {error}"
        findings.add(f"{path}, line {line}", what, "see to its quotes", example=False)
        return None
    if not _columns_fit(path, columns, needed, findings):
        return None
    if not rows:
        findings.add(path, "the table has no line but the first", "fill it in", example=False)
        return None
    notes = [f"{path.name} is separated by {_named(delimiter)}"] if delimiter != "," else []
    if bare is not text:
        notes.append(f"{path.name} begins with a byte-order mark")
    return CsvTable(path, columns, tuple(rows), tuple(lines), tuple(notes))


def inner_path(cell: str) -> str | None:
    r"""The path in a cell, below the folder of the data, with forward slashes; None where it leads elsewhere.

    >>> inner_path(r".\a\b.png"), inner_path("a//b.png"), inner_path("a/../../b.png"), inner_path("/a/b.png")
    ('a/b.png', 'a/b.png', None, None)
    """
    forward = cell.replace("\\", "/")
    parts = [part for part in forward.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or _ABSOLUTE.match(forward):
        return None
    return "/".join(parts)


def _text(path: Path, findings: Findings) -> str | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        findings.add(path, "the table is not there", "give its path from where you are", example=False)
        return None
    except OSError as error:
        findings.add(path, f"the table cannot be read: {error.strerror}", example=False)
        return None
    convert = f"save it as UTF-8, in a spreadsheet or by: iconv -f {{}} -t UTF-8 {path.name} > new.csv"
    if data.startswith(_UTF16) or b"\0" in data[:1000]:
        what = "the table is in the encoding UTF-16, and UTF-8 is read"
        findings.add(path, what, convert.format("UTF-16"), example=False)
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = (
            f"the byte {data[error.start]:#04x} is not UTF-8; the encoding is likely Windows-1252 (Latin-1)"
        )
        findings.add(f"{path}, line {line}", what, convert.format("WINDOWS-1252"), example=False)
        return None


def _delimiter(text: str) -> str:
    """The one that cuts the first line into most cells; a comma where none does."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return max(_DELIMITERS, key=lambda delimiter: len(next(csv.reader([first], delimiter=delimiter), [])))


def _named(delimiter: str) -> str:
    return _DELIMITERS[delimiter]


def _columns_fit(path: Path, columns: tuple[str, ...], needed: Sequence[str], findings: Findings) -> bool:
    if not columns:
        findings.add(path, "the table is empty", "fill it in", example=False)
        return False
    where, before = f"{path}, line 1", len(findings)
    for name in sorted({name for name in columns if columns.count(name) > 1}):
        what = f"{columns.count(name)} columns are named '{name}'" if name else "a column has no name"
        findings.add(where, what, "give each column a name of its own", example=False)
    if columns.count("") == 1:
        findings.add(where, "a column has no name", "give each column a name of its own", example=False)
    for name in needed:
        if name not in columns:
            findings.add(
                where,
                f"there is no column '{name}'",
                f"name the columns in the first line; {nearest(name, columns)}",
                example=False,
            )
    return len(findings) == before
