"""Assigns examples to clients by column, folder or path pattern, and reads the other columns of a table."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.summary_text import listed
from fedlens.data.formats.csv_table import (
    CsvTable,
    coordinates,
    degrees,
    find_path_column,
    inner_path,
    missing,
    off_the_sphere,
    read_csv,
    table_path,
    typed,
)
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import split_named


@dataclass(frozen=True)
class ClientAssignment:
    """How examples are assigned to clients: at most one of three ways; by default by the column `client`.

    Args:
        column: a column of the table, or a field of the annotations.
        level: a folder of the path: 1 is the first, -1 the one that contains the file.
        pattern: a regular expression with one group, searched for in the path.

    Raises `ConfigError` if more than one is given, the level is 0, or the pattern is not a valid one.
    """

    column: str | None = None
    level: int | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        ways = {"client_column": self.column, "client_level": self.level, "client_pattern": self.pattern}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            what = f"{' and '.join(given)} both assign images to clients"
            raise ConfigError(what, where=given[1], hint="set only one of them")
        if self.level == 0:
            raise ConfigError("client_level is 0", where="client_level", hint="1 is the first folder")
        if self.pattern is None:
            return
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            what = f"'{self.pattern}' is not a regular expression: {error}"
            raise ConfigError(what, where="client_pattern") from None
        if groups != 1:
            hint = "put parentheses around the client, as in 'scans/(site[0-9]+)_'"
            what = f"'{self.pattern}' has {groups} groups, and needs exactly one"
            raise ConfigError(what, where="client_pattern", hint=hint)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ClientAssignment:
        """The assignment in a reader's settings `client_column`, `client_level` and `client_pattern`."""
        return cls(*(settings.get(f"client_{name}") for name in ("column", "level", "pattern")))

    def of_path(self, name: str) -> tuple[str, str]:
        """(client, problem) of a path, by `level` or `pattern`; one of them is empty."""
        if self.pattern is not None:
            match = re.search(self.pattern, name)
            if match and match[1]:
                return match[1], ""
            return "", f"client_pattern '{self.pattern}' finds no client in '{name}'"
        assert self.level is not None
        folders = name.split("/")[:-1]
        at = self.level - 1 if self.level > 0 else len(folders) + self.level
        if 0 <= at < len(folders):
            return folders[at], ""
        depth = f"{len(folders)} folder{'s' * (len(folders) > 1)} deep" if folders else "in no folder"
        return "", f"client_level is {self.level}, and '{name}' is {depth}"


def describe(
    scan: Scan,
    *,
    records: Mapping[str, Sequence[Any]] | None = None,
    inner: Sequence[str] | None = None,
) -> bool:
    """Adds the columns, splits and label cells that a table, the annotations and the paths give for `scan.names`.

    Args:
        scan: its settings `table`, `path_column`, `label_column`, `client_column`, `client_level` and
            `client_pattern` are used.
        records: [n] by name, the annotations' further fields for each image; None if an image has none.
        inner: the paths in which `client_level` counts folders, if these are not `scan.names`.

    Returns:
        False if the table cannot be read or does not name files; the reason is in the findings.

    A table is looked for from the current directory, then in `scan.folder`. A column in which every cell is a number
    becomes numbers (an empty cell NaN); all others are strings, and so is `client` always. NaN, null, N/A and NA mean
    a missing client. Columns of coordinates are recognized by name (lat and latitude; lon, longitude, lng and long;
    in any case): if both exist, the columns become numbers, and a missing or impossible coordinate is a problem.

    Raises `ConfigError` if the assignment is invalid, or names a field that does not exist, or a column with
    another meaning.

    >>> from pathlib import Path
    >>> scan = Scan(Path("data"), {"client_level": 1}, names=["mercy/a.png", "mercy/b.png", "north/a.png"])
    >>> describe(scan), scan.columns["client"].tolist()
    (True, ['mercy', 'mercy', 'north'])
    """
    assignment = ClientAssignment.of(scan.settings)
    cells: dict[str, list[Any]] = {name: list(values) for name, values in (records or {}).items()}
    scan.sources = [str(scan.folder / name) for name in scan.names]
    table_name = scan.settings.get("table")
    if table_name is not None:
        table = read_csv(table_path(table_name, scan.folder), scan.findings, scan.folder)
        if table is None:
            return False
        path_column = find_path_column(table, scan.settings.get("path_column"), scan.findings)
        _check_named_columns(scan, table, cells)
        scan.table = table
        if path_column is None:
            return False
        rows = _rows_of(scan, table, path_column)
        scan.sources = [
            source if row is None else table.where(row)
            for source, row in zip(scan.sources, rows, strict=True)
        ]
        for column in table.columns:
            values = table.column(column)
            cells[column] = [None if row is None else values[row] for row in rows]
        del cells[path_column]
        scan.lines = [None if row is None else table.lines[row] for row in rows]
        scan.notes += table.notes
    elif scan.settings.get("path_column") is not None:
        what, hint = "there is no table", "give a table with such a column, data.dataset.table"
        raise ConfigError(what, where="path_column", hint=hint)
    if "split" in cells:
        scan.splits = _splits(scan, cells.pop("split"))
    label = _label_column(scan, cells)
    if label is not None:
        scan.cells = [cell or "" for cell in cells.pop(label)]
    clients = _clients(scan, assignment, cells, inner or scan.names)
    scan.columns = {name: typed(values) for name, values in cells.items() if name != "client"}
    _check_coordinates(scan)
    if clients is not None:
        scan.columns["client"] = np.array(clients, dtype=str)
        _check_several(scan, clients)
    scan.described = bool(scan.names)
    return True


def label_column(scan: Scan) -> str:
    """The name of the table's column with the class of an image."""
    return str(scan.settings.get("label_column") or "label")


def _meanings(scan: Scan) -> dict[str, str]:
    """The columns with another meaning than the class or the client of an image."""
    return {scan.settings.get("path_column") or "path": "its file", "split": "its split"}


def _check_named_columns(scan: Scan, table: CsvTable, fields: Collection[str]) -> None:
    """Adds problems of the whole table: the columns that a setting names and that do not exist.

    `fields` are those of the annotations, which may name the client as well.
    """
    for key, columns in (
        ("label_column", table.columns),
        ("client_column", (*table.columns, *fields)),
    ):
        column = scan.settings.get(key)
        if column is not None and column not in columns:
            what = f"there is no column '{column}', which data.dataset.{key} names"
            scan.findings.add_whole(f"{table.path}, line 1", what, nearest(column, columns))


def _label_column(scan: Scan, cells: Mapping[str, Sequence[Any]]) -> str | None:
    """The column with the classes, if the table has one. Raises `ConfigError` if it is named and does not exist."""
    column, given = label_column(scan), scan.settings.get("label_column") is not None
    if scan.settings.get("table") is not None and column in cells:
        return column
    if not given:
        return None
    if (meaning := _meanings(scan).get(column)) is not None:
        what, hint = f"the column '{column}' gives {meaning}, not its class", "name another column"
    elif scan.table is not None:
        return None  # `_check_named_columns` reports it
    else:
        what = f"there is no column '{column}'"
        hint = "give a table with such a column, data.dataset.table"
    raise ConfigError(what, where="label_column", hint=hint)


def _rows_of(scan: Scan, table: CsvTable, path_column: str) -> list[int | None]:
    """The table's row for each image."""
    # macOS writes an "ü" in a file name as two characters, spreadsheets as one.
    positions = {unicodedata.normalize("NFC", name): at for at, name in enumerate(scan.names)}
    rows: list[int | None] = [None] * len(scan.names)
    cells, elsewhere = table.column(path_column), Counter[str]()
    for row, cell in enumerate(cells):
        path = inner_path(cell)
        if path is None:
            what = f"the path '{cell}' is not below the data folder" if cell else "the path is empty"
            scan.findings.add(table.where(row), what, f"write it as seen from {scan.folder}")
            continue
        path = unicodedata.normalize("NFC", path)
        at = positions.get(path)
        if at is None:  # the path may start at the folder of the images, as in the annotations
            within = [f for f in scan.image_folders if f"{f}/{path}" in positions]
            if len(within) > 1:
                what = f"'{path}' is in several folders: {listed(within)}"
                scan.findings.add(table.where(row), what, f"write it as seen from {scan.folder}")
                continue
            if within:
                at = positions[f"{within[0]}/{path}"]
                elsewhere[within[0]] += 1
        if at is None:
            scan.findings.add(table.where(row), *_absent(path, scan))
        elif (first := rows[at]) is None:
            rows[at] = row
        else:
            same = table.rows[first] == table.rows[row]
            other = "the same" if same else "other"
            what = f"'{path}' is in line {table.lines[first]} too, with {other} cells"
            scan.findings.add(table.where(row), what, "remove one of the lines")
            if not same:
                scan.bad.add(at)
    if slashes := sum("\\" in cell for cell in cells):
        scan.notes.append(f"{slashes:,} paths of {table.path.name} had backslashes, read as slashes")
    scan.notes += [
        f"{count:,} {'path' if count == 1 else 'paths'} of {table.path.name} found in {folder}/"
        for folder, count in elsewhere.items()
    ]
    if absent := [at for at, row in enumerate(rows) if row is None]:
        count = f"{len(absent):,} of {len(scan.names):,} images are" if len(absent) > 1 else "an image is"
        what = f"{count} not in the table: {listed([scan.names[at] for at in absent])}"
        scan.findings.add(table.path, what, "add a line for each, or move them elsewhere")
        scan.bad.update(absent)
    return rows


def _absent(path: str, scan: Scan) -> tuple[str, str]:
    """(problem, hint) of a path in a table that is no image of the dataset."""
    if os.path.exists(scan.folder / path):  # of a name that is too long, `Path.exists` raises
        return f"'{path}' is not an image of this dataset", "remove the line"
    file = path.rpartition("/")[2]
    elsewhere = next((name for name in scan.names if name.rpartition("/")[2] == file), None)
    hint = f"paths start at {scan.folder}: did you mean '{elsewhere}'?" if elsewhere else "remove the line"
    return f"the file '{path}' does not exist", hint


def _splits(scan: Scan, cells: Sequence[Any]) -> list[str]:
    splits = [split_named(str(cell)) if cell else None for cell in cells]
    for row, (cell, split) in enumerate(zip(cells, splits, strict=True)):
        if split is None:
            what = f"there is no split '{cell}'" if cell else "the split is empty"
            scan.reject(row, scan.sources[row], what, "write train, test or validation")
    return [split or "train" for split in splits]


def _clients(
    scan: Scan, assignment: ClientAssignment, cells: Mapping[str, Sequence[Any]], paths: Sequence[str]
) -> list[str] | None:
    """The client of each image, "" if it is missing; None if nothing assigns clients."""
    if assignment.level is not None or assignment.pattern is not None:
        pairs = [assignment.of_path(path) for path in paths]
        hint = (
            "use the same folders for all files" if assignment.level is not None else "check client_pattern"
        )
    else:
        column = assignment.column or "client"
        if column not in cells:
            if assignment.column is None:
                return None
            meanings = _meanings(scan)
            if scan.cells is not None:
                meanings[label_column(scan)] = "its class"
            if column in meanings:
                what = f"the column '{column}' gives {meanings[column]}, not the client of an image"
                raise ConfigError(what, where="client_column", hint="name another column")
            if scan.table is not None:
                return None  # `_check_named_columns` reports it
            hint = nearest(column, cells) if cells else "give a table with such a column, data.dataset.table"
            raise ConfigError(f"there is no column '{column}'", where="client_column", hint=hint)
        values = ["" if value is None else str(value).strip() for value in cells[column]]
        problems = map(missing, values)
        pairs = [
            ("", f"the cell '{column}' {p}") if p else (v, "") for v, p in zip(values, problems, strict=True)
        ]
        hint = "write the client of the image"
    for row, (client, what) in enumerate(pairs):
        if not client:
            scan.reject(row, scan.sources[row], what, hint)
    return [client for client, _ in pairs]


def _check_several(scan: Scan, clients: Sequence[str]) -> None:
    rows = scan.rows()
    if len(rows) > 1 and len({clients[row] for row in rows}) == 1:
        what = f"all {len(rows):,} examples belong to one client, '{clients[rows[0]]}'"
        hint = "take another column, level or pattern; without any of them, a partition makes the clients"
        scan.findings.add_whole(scan.folder, what, hint)


def _check_coordinates(scan: Scan) -> None:
    """Turns columns of coordinates into numbers; missing and impossible ones are problems."""
    for name, limit in coordinates(scan.columns).items():
        values = scan.columns[name].tolist()
        scan.columns[name] = degrees(values)
        for row, what, hint in off_the_sphere(name, limit, values):
            scan.reject(row, scan.sources[row], what, hint)
