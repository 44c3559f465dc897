"""Reads CSV tables of several dialects, their cells and the meaning of their columns; problems have a line.

The cells are read with Python's `csv` and not with pandas, which gives no line numbers, accepts a quote that is never
closed, and changes cells ("007", "NA").
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError, nearest
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.file_safety import read_bytes
from fedlens.data.formats.probe import FORMATS

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MOST_COLUMNS = 10_000
_ABSOLUTE = re.compile(r"/|[A-Za-z]:|~")

# What programs write for a missing value. "None" is left out: "none" is a class in many tables.
_MISSING = {"nan", "null", "n/a", "#n/a", "<na>"}
_LIMITS = {"lat": 90.0, "latitude": 90.0, "lon": 180.0, "longitude": 180.0, "lng": 180.0, "long": 180.0}

PATH_WORDS = ("path", "file", "filename", "filepath", "image")
LABEL_WORDS = ("label", "class", "category", "target", "diagnosis", "species")
CLIENT_WORDS = (
    "client",
    "hospital",
    "clinic",
    "site",
    "center",
    "institution",
    "user",
    "device",
    "writer",
    "city",
)
_LIKE = 0.7  # of SequenceMatcher: names of columns that are alike
_DIFFERENT = 1 / 3  # of the cells of a column of clients, at most
_SAMPLE = 200  # cells of a column that are looked at
_FILES = 0.8  # the share of these from which a column is one of image files


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


def missing(text: str) -> str | None:
    """The problem of a cell without a value, as the rest of a sentence; None if it has one.

    Besides empty cells, these are NaN, null, N/A, #N/A and <NA> in any case, and NA in capitals.

    >>> missing("mercy"), missing(""), missing("NaN")
    (None, 'is empty', "is 'NaN', which stands for a missing value")
    """
    if not text:
        return "is empty"
    stands = text == "NA" or text.lower() in _MISSING
    return f"is '{text}', which stands for a missing value" if stands else None


def typed(values: Sequence[Any]) -> NDArray[Any]:
    """The cells as whole numbers, else numbers, else strings, without losing information; an empty cell is NaN.

    >>> typed(["1", "2"]).tolist(), typed(["1.5", None]).tolist(), typed(["007", "8"]).tolist()
    ([1, 2], [1.5, nan], ['007', '8'])
    """
    texts = ["" if value is None else str(value) for value in values]
    full = [text for text in texts if text]
    if not full or not all(map(is_number, full)):
        return np.array(texts, dtype=str)
    if len(full) == len(texts) and all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts):
        return np.array([int(text) for text in texts], np.int64)
    return np.array([float(text) if text else math.nan for text in texts])


def is_number(text: str) -> bool:
    """Whether a cell is a number. 007 is a name, and so is 1_000, which Python accepts as a number."""
    return re.fullmatch(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is not None


def coordinates(columns: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """The columns of latitudes and longitudes, and the largest valid degree of each.

    They are recognized by name, in any case: lat and latitude, lon, longitude, lng and long. Both must exist: a column
    `long` alone may be anything.

    >>> coordinates({"Latitude": np.zeros(1), "lng": np.zeros(1)}), coordinates({"long": np.zeros(1)})
    ({'Latitude': 90.0, 'lng': 180.0}, {})
    """
    limits = {name: _LIMITS[name.lower()] for name in columns if name.lower() in _LIMITS}
    return limits if len(set(limits.values())) == 2 else {}


def degrees(column: Sequence[Any]) -> NDArray[np.float64]:
    """The numbers in a column of coordinates; NaN for other cells."""
    return np.array([_degrees(value) for value in column], np.float64)


def off_the_sphere(name: str, limit: float, column: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """(row, problem, hint) of each cell that is not in -limit .. limit degrees."""
    for row, value in enumerate(column):
        if not abs(_degrees(value)) <= limit:
            none = value == "" or (isinstance(value, float) and math.isnan(value))
            what = (
                f"'{name}' is missing"
                if none
                else f"'{name}' is {value}, which is not a coordinate in degrees"
            )
            yield row, what, f"write degrees from -{limit:g} to {limit:g}"


def _degrees(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def closest(columns: Sequence[str], words: Sequence[str]) -> str | None:
    """The column whose name is most like one of `words`, if any is like it.

    >>> closest(["klass", "age"], ["label", "class"])
    'klass'
    """
    likeness = {
        name: max(SequenceMatcher(None, name.casefold(), word).ratio() for word in words) for name in columns
    }
    best = max(likeness, key=lambda name: likeness[name], default=None)
    return best if best is not None and likeness[best] >= _LIKE else None


def client_column(columns: Mapping[str, NDArray[Any]]) -> str | None:
    """The column that likely names the clients: by its name, or else the first of texts with few different ones.

    >>> client_column({"age": np.arange(9), "shop": np.array(["Celle", "Dessau", "Gera"] * 3)})
    'shop'
    """
    few = (name for name, cells in columns.items() if cells.dtype.kind == "U" and _repeats(cells))
    return closest(list(columns), CLIENT_WORDS) or next(few, None)


def _repeats(cells: NDArray[Any]) -> bool:
    different = len(np.unique(cells))
    return 2 <= different <= len(cells) * _DIFFERENT


def image_column(table: CsvTable) -> str | None:
    """The column whose cells name image files; of several, the one with the likeliest name, or else the first."""
    files = [name for name in table.columns if _names_images(table.column(name))]
    return closest(files, PATH_WORDS) or next(iter(files), None)


def find_path_column(table: CsvTable, given: str | None, findings: Findings) -> str | None:
    """The column with the file of each image: `given`, the setting `path_column`, or else `path`.

    If there is no such column, that is a problem of the whole table, and the column whose cells name image files is
    returned, so that the rest of the table is checked too. None if there is none.
    """
    column = given or "path"
    if column in table.columns:
        return column
    files = image_column(table)
    best = files or closest(table.columns, PATH_WORDS)
    rename = "Set" if given else "Rename it to 'path', or set"
    if best is None:
        hint = f"name the columns in the first line; {nearest(column, table.columns)}"
    else:
        hint = f"did you mean '{best}'? {rename} {as_setting('path_column', best)}"
    of_setting = ", which data.dataset.path_column names" if given else ""
    findings.add_whole(f"{table.path}, line 1", f"there is no column '{column}'{of_setting}", hint)
    return files


def as_setting(key: str, column: str) -> str:
    """The setting that names a column, ready to be copied.

    >>> as_setting("path_column", "file")
    'data.dataset.path_column = "file"'
    """
    return f"data.dataset.{key} = {json.dumps(column, ensure_ascii=False)}"


def _names_images(cells: Sequence[str]) -> bool:
    full = [cell for cell in cells[:_SAMPLE] if cell]
    named = sum(cell.lower().endswith(tuple(FORMATS)) for cell in full)
    return bool(full) and named >= _FILES * len(full)
