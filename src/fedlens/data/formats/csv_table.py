"""Reads CSV tables of several dialects, and reports problems with their line.

The cells are read with Python's `csv` and not with pandas, which gives no line numbers, accepts a quote that is never
closed, and changes cells ("007", "NA").
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.texts import read_bytes

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MOST_COLUMNS = 10_000
_ABSOLUTE = re.compile(r"/|[A-Za-z]:|~")


@dataclass(frozen=True)
class CsvTable:
    """The rows of a table, with one cell per column; cells are stripped of white space.

    Args:
        path: the file.
        columns: the names in its first line.
        rows: the cells of each row.
        lines: the line of the file at which each row begins, from 1 on.
        notes: sentences on unusual properties of the file.
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[str]:
        """The cells of a column. Raises `ValueError` if there is no such column."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def where(self, row: int) -> str:
        """The file and line of a row."""
        return f"{self.path}, line {self.lines[row]}"


def read_csv(path: Path, findings: Findings, folder: Path | None = None) -> CsvTable | None:
    """The table in a file; None if it cannot be read, for reasons that are added to `findings`.

    UTF-8 is read with and without a byte-order mark; cells are separated by commas, semicolons or tabs,
    whichever split the first line into the most cells. A quoted cell may hold line breaks. Empty lines are ignored.

    A line with too many or too few cells is a problem and is left out. Another encoding, a quote that is not
    closed, a cell of more than 131,072 characters, more than 10,000 columns, an empty table and two columns of one name
    are problems of the whole table. So is a link from within `folder` to a file outside.
    """
    text = findings.attempt(_text, path, folder, example=False)
    if text is None:
        return None
    content = text.removeprefix("\ufeff")
    delimiter = _delimiter(content)
    separators = _DELIMITERS[delimiter]
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            row = tuple(cell.strip() for cell in cells)
            if any(row):
                if not columns:
                    columns = row
                    if len(columns) > _MOST_COLUMNS:
                        break
                elif len(row) == len(columns):
                    rows.append(row)
                    lines.append(line)
                else:
                    what = f"the line has {len(row)} cells, and the first line has {len(columns)}"
                    findings.add(f"{path}, line {line}", what, f"quote cells that contain {separators}")
            line = reader.line_num + 1
    except csv.Error as error:
        what = f"the table cannot be read from here on: {error}"
        if "field limit" in str(error):
            what = f"a cell has more than {csv.field_size_limit():,} characters"
        findings.add_whole(f"{path}, line {line}", what, "check the quotes")
        return None
    if len(columns) > _MOST_COLUMNS:
        what = f"the first line has {len(columns):,} columns, and at most {_MOST_COLUMNS:,} are read"
        findings.add_whole(
            f"{path}, line {line}", what, "write one line per image, and a column per property"
        )
        return None
    if not _columns_fit(path, columns, findings):
        return None
    if not rows:
        findings.add_whole(
            path, f"the table {'has only its first line' if columns else 'is empty'}", "fill it in"
        )
        return None
    notes = [f"{path.name} is separated by {separators}"] if delimiter != "," else []
    if content is not text:
        notes.append(f"{path.name} begins with a byte-order mark")
    return CsvTable(path, columns, tuple(rows), tuple(lines), tuple(notes))


def table_path(given: str, folder: Path) -> Path:
    """The file of a table: as seen from the current directory, or else in `folder`."""
    here = Path(given).expanduser()
    return here if here.exists() or not (folder / here).exists() else folder / here


def inner_path(cell: str) -> str | None:
    r"""The path in a cell, below the data folder, with forward slashes; None if it leads elsewhere.

    >>> inner_path(r".\a\b.png"), inner_path("a//b.png"), inner_path("a/../../b.png"), inner_path("/a/b.png")
    ('a/b.png', 'a/b.png', None, None)
    """
    forward = cell.replace("\\", "/")
    parts = [part for part in forward.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or _ABSOLUTE.match(forward):
        return None
    return "/".join(parts)


def _text(path: Path, folder: Path | None) -> str:
    try:
        data = read_bytes(path, folder)
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            hint = "give its path as seen from the current directory"
            raise DataError("the table does not exist", where=str(path), hint=hint) from None
        raise
    convert = f"save it as UTF-8, in a spreadsheet or by: iconv -f {{}} -t UTF-8 {path.name} > new.csv"
    if data.startswith(_UTF16) or b"\0" in data[:1000]:
        what = "the encoding of the table is UTF-16, but must be UTF-8"
        raise DataError(what, where=str(path), hint=convert.format("UTF-16"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = (
            f"the byte {data[error.start]:#04x} is not UTF-8; the encoding is probably Windows-1252 (Latin-1)"
        )
        raise DataError(what, where=f"{path}, line {line}", hint=convert.format("WINDOWS-1252")) from None


def _delimiter(text: str) -> str:
    """The delimiter that splits the first line into the most cells; a comma if none does."""
    first = next((line for line in text.splitlines() if line.strip()), "")

    def cells(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter), []))
        except csv.Error:  # a cell that is too long; the reading of the table reports it
            return 0

    return max(_DELIMITERS, key=cells)


def _columns_fit(path: Path, columns: tuple[str, ...], findings: Findings) -> bool:
    where, before = f"{path}, line 1", len(findings)
    counts = Counter(columns)
    for name in sorted(name for name, count in counts.items() if not name or count > 1):
        what = f"{counts[name]:,} columns are named '{name}'" if name else "a column has no name"
        findings.add_whole(where, what, "give each column its own name")
    return len(findings) == before
