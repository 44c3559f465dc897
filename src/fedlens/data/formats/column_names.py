"""Recognizes the columns of a table: the file of an image, its class, its client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import nearest
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import CsvTable
from fedlens.data.formats.probe import FORMATS

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
