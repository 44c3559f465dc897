from pathlib import Path

import pytest

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.csv_table import CsvTable, closest, find_path_column, image_column


def table(columns: str, *rows: str) -> CsvTable:
    cells = tuple(tuple(row.split(",")) for row in rows)
    return CsvTable(Path("t.csv"), tuple(columns.split(",")), cells, tuple(range(2, 2 + len(rows))))


def test_a_column_of_files_is_recognized_by_its_cells() -> None:
    assert image_column(table("id,where", "1,a.png", "2,b.JPG")) == "where"
    assert image_column(table("mask,file", "m.png,a.png")) == "file"
    assert image_column(table("id,where", "1,a", "2,b.png")) is None


@pytest.mark.parametrize(
    ("columns", "cell", "given", "hint", "read"),
    [
        ("x,y", "1,a.png", None, "did you mean 'y'? Rename it to 'path', or set data.dataset.path_column = \"y\"", "y"),
        ("Path,y", "1,2", None, "did you mean 'Path'? Rename it to 'path', or set", None),
        ("x,y", "1,a.png", "z", "did you mean 'y'? Set data.dataset.path_column = \"y\"", "y"),
        ("x,y", "1,2", None, "name the columns in the first line; known: x, y", None),
    ],
)  # fmt: skip
def test_a_missing_column_of_files_suggests_one(
    columns: str, cell: str, given: str | None, hint: str, read: str | None
) -> None:
    findings = Findings()
    assert find_path_column(table(columns, cell), given, findings) == read
    assert str(findings.found[0].hint).startswith(hint)
    assert not findings.found[0].example


def test_names_that_are_unlike_are_not_suggested() -> None:
    assert closest(["age", "dose"], ["label"]) is None
