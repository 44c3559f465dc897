"""Assigns examples to clients by column, folder or path pattern, and reads the other columns of a table."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import ConfigError, nearest
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.cells import coordinates, degrees, missing, off_the_sphere, typed
from fedlens.data.formats.csv_table import CsvTable, inner_path, read_csv
from fedlens.data.formats.splits import split_named

_FIRST = 3  # how many names a sentence gives
# Columns that already say something else of an image than whose it is.
_USES = {"path": "which file it is", "label": "its class", "split": "its split"}


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
        given = [
            f"client_{name}" for name in ("column", "level", "pattern") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} both say whose an image is", where=given[1], hint="give one of them"
            )
        if self.level == 0:
            raise ConfigError("client_level is 0", where="client_level", hint="1 is the first folder")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ConfigError(
                    f"'{self.pattern}' is no regular expression: {error}", where="client_pattern"
                ) from None
            if groups != 1:
                raise ConfigError(
                    f"'{self.pattern}' has {groups} groups, and one is wanted",
                    where="client_pattern",
                    hint="put brackets around what names the client, as in 'scans/(site[0-9]+)_'",
                )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ClientAssignment:
        """The assignment in a reader's settings `client_column`, `client_level` and `client_pattern`."""
        return cls(*(settings.get(f"client_{name}") for name in ("column", "level", "pattern")))


@dataclass
class Described:
    """What is known of each of the examples, beside their images and targets.

    Args:
        columns: [n] by name: `client` where there is a rule, and every further column of the table or records.
        splits: "train", "test" or "validation" of each, where the table says so.
        labels: the cells of the table's column `label`, where it has one.
        where: the line of the table for each example, where there is a table that can be read.
        bad: the rows in which something is at fault; it is in the findings.
        notes: sentences on what was put right.
    """

    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    splits: list[str] | None = None
    labels: list[str] | None = None
    where: list[str] | None = None
    bad: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def describe(
    names: Sequence[str],
    settings: Mapping[str, Any],
    folder: Path,
    findings: Findings,
    *,
    records: Mapping[str, Sequence[Any]] | None = None,
    inner: Sequence[str] | None = None,
) -> Described:
    """What a table, the annotations and the paths say of the examples in the files `names`.

    Args:
        names: the file of each example below `folder`, with forward slashes.
        settings: of the reader; `table`, `client_column`, `client_level` and `client_pattern` are looked at.
        folder: the folder of the data.
        findings: where everything is added that is wrong.
        records: [n] by name, what the annotations say of each example; None where they do not.
        inner: the paths in which folders are counted, where these are not `names`.

    A table is looked for from where the user is, then in `folder`. A further column in which every cell is a
    number becomes numbers (an empty cell NaN); all others are strings, and so is `client` always. A client that
    is NaN, null, N/A or NA is a missing one. Columns of coordinates go by their names (lat and latitude; lon,
    longitude, lng and long; in any case): where there are both, a place that is missing or off the sphere is a
    finding, and the columns are numbers.

    Raises `ConfigError` where the rule is none, or names a column that there is not, or that has another use.

    >>> names = ["mercy/a.png", "mercy/b.png", "north/a.png"]
    >>> described = describe(names, {"client_level": 1}, Path("data"), Findings())
    >>> described.columns["client"].tolist()
    ['mercy', 'mercy', 'north']
    """
    rule = ClientAssignment.of(settings)
    described = Described()
    cells: dict[str, list[Any]] = {name: list(values) for name, values in (records or {}).items()}
    source: list[str] = [str(folder / name) for name in names]
    if settings.get("table") is not None:
        table = read_csv(table_path(settings["table"], folder), findings)
        if table is None:
            return described  # why is in the findings
        rows = _rows_of(names, table, folder, described, findings)
        source = [name if row is None else table.where(row) for name, row in zip(source, rows, strict=True)]
        for column in table.columns:
            given = table.column(column)
            if column != "path":
                cells[column] = [None if row is None else given[row] for row in rows]
        described.notes.extend(table.notes)
        described.where = source
    if "split" in cells:
        described.splits = _splits(cells.pop("split"), source, described.bad, findings)
    if "label" in cells and settings.get("table") is not None:
        described.labels = [cell or "" for cell in cells.pop("label")]
    clients = _clients(rule, cells, inner or names, source, described.bad, findings)
    for name, values in cells.items():
        if name != "client":
            described.columns[name] = typed(values)
    _check_coordinates(described, source, findings)
    if clients is not None:
        described.columns["client"] = np.array(clients, dtype=str)
        _check_several(described, folder, findings)
    return described


def table_path(given: str, folder: Path) -> Path:
    """The file of a table: as seen from where the user is, or else in `folder`."""
    here = Path(given).expanduser()
    return here if here.exists() or not (folder / here).exists() else folder / here


def listed(names: Sequence[str], count: int | None = None) -> str:
    """The first few names, and how many there are beside them, of `count` in all where not all are at hand.

    >>> listed(["a", "b", "c", "d", "e"]), listed(["0", "1", "2"], 2000)
    ('a, b, c and 2 more', '0, 1, 2 and 1,997 more')
    """
    rest = (len(names) if count is None else count) - _FIRST
    more = f" and {rest:,} more" if rest > 0 else ""
    return ", ".join(names[:_FIRST]) + more


def _rows_of(
    names: Sequence[str], table: CsvTable, folder: Path, described: Described, findings: Findings
) -> list[int | None]:
    """The table's row for each name."""
    # macOS writes an "ü" in a file name as two characters, spreadsheets as one.
    places = {unicodedata.normalize("NFC", name): at for at, name in enumerate(names)}
    rows: list[int | None] = [None] * len(names)
    slashes = 0
    for row, cell in enumerate(table.column("path")):
        path = inner_path(cell)
        slashes += "\\" in cell
        if path is None:
            what = f"the path '{cell}' is not below the folder of the data" if cell else "the path is empty"
            findings.add(table.where(row), what, f"write it as seen from {folder}")
            continue
        at = places.get(unicodedata.normalize("NFC", path))
        if at is None:
            findings.add(table.where(row), *_absent(path, folder, names))
        elif (first := rows[at]) is None:
            rows[at] = row
        else:
            same = table.rows[first] == table.rows[row]
            other = "the same" if same else "something else"
            what = f"'{path}' stands in line {table.lines[first]} too, which says {other} of it"
            findings.add(table.where(row), what, "remove one of the lines")
            if not same:
                described.bad.add(at)
    if slashes:
        described.notes.append(f"{slashes:,} paths of {table.path.name} had backslashes, read as slashes")
    absent = [at for at, row in enumerate(rows) if row is None]
    if absent:
        count = f"{len(absent):,} of {len(names):,} images are" if len(absent) > 1 else "an image is"
        what = f"{count} not in the table: {listed([names[at] for at in absent])}"
        findings.add(table.path, what, "add a line for each, or move them elsewhere")
        described.bad.update(absent)
    return rows


def _absent(path: str, folder: Path, names: Sequence[str]) -> tuple[str, str]:
    if (folder / path).exists():
        return f"'{path}' is no image that belongs to these data", "remove the line"
    last = path.rpartition("/")[2]
    elsewhere = next((name for name in names if name.rpartition("/")[2] == last), None)
    hint = f"paths count from {folder}: is '{elsewhere}' meant?" if elsewhere else "remove the line"
    return f"the file '{path}' is not there", hint


def _splits(cells: Sequence[Any], source: Sequence[str], bad: set[int], findings: Findings) -> list[str]:
    splits = []
    for row, cell in enumerate(cells):
        named = split_named(str(cell)) if cell else None
        if named is None and row not in bad:
            what = f"there is no split '{cell}'" if cell else "the split is empty"
            findings.add(source[row], what, "write train, test or validation")
            bad.add(row)
        splits.append(named or "train")
    return splits


def _clients(
    rule: ClientAssignment,
    cells: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    source: Sequence[str],
    bad: set[int],
    findings: Findings,
) -> list[str] | None:
    """The client of each example, "" where there is none; None where there is no rule."""
    if rule.level is not None or rule.pattern is not None:
        found = [_by_path(rule, name) for name in names]
        hint = "lay the files out alike" if rule.level is not None else "see to client_pattern"
    else:
        column = rule.column or "client"
        if column not in cells:
            if rule.column is None:
                return None
            if column in _USES:
                what = f"the column '{column}' says of an image {_USES[column]}, not whose it is"
                raise ConfigError(what, where="client_column", hint="name another column")
            hint = nearest(column, cells) if cells else "give a table with such a column, data.dataset.table"
            raise ConfigError(f"there is no column '{column}'", where="client_column", hint=hint)
        values = [("" if value is None else str(value).strip()) for value in cells[column]]
        faults = [missing(value) for value in values]
        found = [
            ("" if fault else v, f"the cell '{column}' {fault}")
            for v, fault in zip(values, faults, strict=True)
        ]
        hint = "write whose it is"
    for row, (client, what) in enumerate(found):
        if not client and row not in bad:
            findings.add(source[row], what, hint)
            bad.add(row)
    return [client for client, _ in found]


def _by_path(rule: ClientAssignment, name: str) -> tuple[str, str]:
    """(client, what is wrong where it is empty)."""
    if rule.pattern is not None:
        match = re.search(rule.pattern, name)
        return (
            match[1] or ""
        ) if match else "", f"client_pattern '{rule.pattern}' finds no client in '{name}'"
    assert rule.level is not None
    folders = name.split("/")[:-1]
    at = rule.level - 1 if rule.level > 0 else len(folders) + rule.level
    if 0 <= at < len(folders):
        return folders[at], ""
    deep = f"{len(folders)} folder{'' if len(folders) == 1 else 's'} deep" if folders else "in no folder"
    return "", f"client_level is {rule.level}, and '{name}' lies {deep}"


def _check_several(described: Described, folder: Path, findings: Findings) -> None:
    good = [c for row, c in enumerate(described.columns["client"].tolist()) if row not in described.bad]
    if len(set(good)) == 1 and len(good) > 1:
        findings.add(
            folder,
            f"all {len(good):,} examples belong to one client, '{good[0]}'",
            "take another column, level or pattern; without any, a partition can make clients up",
            example=False,
        )


def _check_coordinates(described: Described, source: Sequence[str], findings: Findings) -> None:
    """Latitudes and longitudes that are missing or not on the sphere; the columns become numbers."""
    for name, limit in coordinates(described.columns).items():
        values = described.columns[name].tolist()
        described.columns[name] = degrees(values)
        for row, what, hint in off_the_sphere(name, limit, values):
            if row not in described.bad:
                findings.add(source[row], what, hint)
                described.bad.add(row)
