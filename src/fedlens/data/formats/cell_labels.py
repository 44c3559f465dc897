"""Labels from the column of a table that has the names or numbers of the classes, one or several a cell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path

from fedlens.base.errors import nearest
from fedlens.base.summary_text import listed
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.clients import label_column
from fedlens.data.formats.csv_table import is_number, missing
from fedlens.data.formats.scan import Scan

_MOST = 100  # classes that a hint lists
_SEPARATORS = (";", "|", ",")


def classes_in_cells(texts: Sequence[str], table: Path, findings: Findings) -> list[str]:
    """The classes that a column names: sorted names, or the whole numbers from 0 on.

    Numbers that skip some, are below 0 or are not whole are a problem of the whole set; they are taken as names.

    >>> classes_in_cells(["2", "0", "1"], Path("t.csv"), Findings())
    ['0', '1', '2']
    """
    different = {text for text in texts if missing(text) is None}
    if not all(_is_whole(text) or is_number(text) for text in different):
        return sorted(different)
    by_size = sorted(different, key=lambda text: (float(text), text))
    if fractions := [text for text in by_size if not _is_whole(text)]:
        what = f"the labels are numbers, but not whole ones: {listed(fractions)}"
    else:
        numbers = sorted({int(text) for text in by_size})
        if numbers == list(range(len(numbers))):
            return [str(number) for number in numbers]
        what = f"the label {numbers[0]} is below 0" if numbers[0] < 0 else skipped(numbers)
    names = as_setting(by_size) if len(by_size) <= _MOST else "name each in data.dataset.classes"
    findings.add_whole(table, what, f"number them from 0 on, or take them as names: {names}")
    return by_size


def skipped(numbers: Sequence[int]) -> str:
    """A sentence with the first numbers that ascending labels from 0 on skip.

    >>> skipped([0, 2])
    'the labels skip 1, and go up to 2'
    """
    used = set(numbers)
    # Labels may be ids of many digits: the skipped ones are counted without listing them.
    number = numbers[-1] + 1 - len(used)
    first = islice((str(label) for label in count() if label not in used), min(number, 3))
    return f"the labels skip {listed(list(first), count=number)}, and go up to {numbers[-1]}"


def as_setting(classes: Sequence[str]) -> str:
    """The setting that names the classes, ready to be copied.

    >>> as_setting(["0", "2"])
    'data.dataset.classes = ["0", "2"]'
    """
    return f"data.dataset.classes = {json.dumps(classes, ensure_ascii=False)}"


def labels_of_cells(scan: Scan) -> list[int]:
    """The label of each of `scan.cells`, a name in `scan.classes` or a position in it; -1 if it is neither.

    Those that are neither become problems of `scan`. A whole number is a position only if no class is named by a
    number: otherwise it is a name that is misspelt.

    >>> labels_of_cells(Scan(Path(), classes=("cat", "dog"), cells=["dog", "0"], sources=["line 2", "line 3"]))
    [1, 0]
    """
    find = _finder(scan.classes)
    labels = []
    for row, text in enumerate(scan.cells or ()):
        label = find(text)
        if label is None:
            problem = f"there is no class '{text}'", nearest(text, scan.classes)
            if absent := missing(text):
                problem = f"the cell '{label_column(scan)}' {absent}", "write the class of the image"
            scan.reject(row, scan.sources[row], *problem)
        labels.append(-1 if label is None else label)
    return labels


def names_in_cells(scan: Scan, cells: Sequence[str], separator: str) -> list[list[str]]:
    """The names in each of `cells`, stripped of white space and each once; none in an empty cell.

    A cell that stands for a missing value, such as NaN, is a problem of its row: whether the image has a label is not
    known. A note of `scan` counts the cells that repeat a name.

    >>> names_in_cells(Scan(Path()), ["cat; dog", "", "dog;dog"], ";")
    [['cat', 'dog'], [], ['dog']]
    """
    rows, repeated = [], 0
    for row, cell in enumerate(cells):
        names = [name for piece in cell.split(separator) if (name := piece.strip())]
        if len(names) == 1 and (absent := missing(names[0])):
            hint = "write the classes of the image, or leave the cell empty for none"
            scan.reject(row, scan.sources[row], f"the cell '{label_column(scan)}' {absent}", hint)
            names = []
        rows.append(list(dict.fromkeys(names)))
        repeated += len(rows[-1]) < len(names)
    if repeated:
        cells_repeat = "1 cell repeats" if repeated == 1 else f"{repeated:,} cells repeat"
        scan.notes.append(f"{cells_repeat} a class, which counts once")
    return rows


def label_sets(scan: Scan, names: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """The labels of each row, ascending, from the names in its cell, read as by `labels_of_cells`.

    A name that is not in `scan.classes` is a problem of its row.
    """
    find = _finder(scan.classes)
    sets = []
    for row, of_row in enumerate(names):
        labels = [find(name) for name in of_row]
        if None in labels:
            unknown = of_row[labels.index(None)]
            scan.reject(
                row, scan.sources[row], f"there is no class '{unknown}'", nearest(unknown, scan.classes)
            )
        sets.append(tuple(sorted({label for label in labels if label is not None})))
    return sets


def warn_of_separators(scan: Scan, table: Path) -> None:
    """Adds a warning if the names of classes look like lists of several: 'cat;dog' beside 'dog'.

    >>> scan = Scan(Path(), classes=("cat", "cat;dog"))
    >>> warn_of_separators(scan, Path("t.csv"))
    >>> scan.findings.warnings[0].what
    "the class 'cat;dog' looks like several classes, separated by ';'"
    """
    known = set(scan.classes)
    for separator in _SEPARATORS:
        for name in scan.classes:
            pieces = [piece.strip() for piece in name.split(separator)]
            if len(pieces) > 1 and known.intersection(pieces):
                what = f"the class '{name}' looks like several classes, separated by '{separator}'"
                hint = f'if it is, set data.dataset.separator = "{separator}"'
                scan.findings.warn(table, what, hint)
                return


def _finder(classes: Sequence[str]) -> Callable[[str], int | None]:
    """A function from a name, or a position where no class is named by a number, to its label; else to None."""
    positions = {name: at for at, name in enumerate(classes)}
    may_be_numbers = not any(map(_is_whole, classes))

    def find(text: str) -> int | None:
        label = positions.get(text)
        if label is None and may_be_numbers and text.isdecimal() and int(text) < len(classes):
            return int(text)
        return label

    return find


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", text) is not None
