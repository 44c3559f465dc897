import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import DataError
from fedlens.data.formats.cell_labels import labels_of_cells
from fedlens.data.formats.image_folder import fill
from fedlens.data.formats.reader import examine
from fedlens.data.formats.scan import Scan
from tests.unit.data.formats.test_image_folder import check, dataset, lay_out, table


def numbered(root: Path, labels: str, **settings: Any) -> tuple[Scan, list[str]]:
    lay_out(root, *(f"{at:02}.png" for at in range(len(labels.split()))))
    lines = [f"{at:02}.png,{label}" for at, label in enumerate(labels.split())]
    return check(root, table=str(root / table(root, *lines, header="path,label")), **settings)


def test_labels_may_be_whole_numbers(tmp_path: Path) -> None:
    found, told = numbered(tmp_path, "2 10 0 1 3 4 5 6 7 8 9")
    assert told == []
    assert found.classes == tuple(map(str, range(11)))
    assert found.labels == [2, 10, 0, 1, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ("0 1 3", "t.csv: the labels skip 2, and go up to 3"),
        ("1 2 3", "t.csv: the labels skip 0, and go up to 3"),
        ("0 1 9", "t.csv: the labels skip 2, 3, 4 and 4 more, and go up to 9"),
        ("-1 0 1", "t.csv: the label -1 is below 0"),
    ],
)
def test_labels_that_skip_numbers_are_a_fault_of_the_whole(tmp_path: Path, labels: str, what: str) -> None:
    _, told = numbered(tmp_path, labels)
    assert told[0] == what
    with pytest.raises(DataError, match=r"data\.dataset\.classes"):
        dataset(tmp_path, table=str(tmp_path / "t.csv"), on_error="skip")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ("0 2 0 2", ["0", "2"]),
        ("01 2 01 10", ["01", "2", "10"]),
        ("-1 0 -1 0", ["-1", "0"]),
        ("0.0 1.0 0.0 1", ["0.0", "1", "1.0"]),
        ("0.5 1.5 10.5", ["0.5", "1.5", "10.5"]),
    ],
)
def test_the_hint_on_numbers_names_the_classes_that_help(
    tmp_path: Path, labels: str, classes: list[str]
) -> None:
    numbered(tmp_path, labels)
    settings = {"path": str(tmp_path), "table": str(tmp_path / "t.csv")}
    findings = examine(fill, settings, full=False).findings
    (finding,) = findings
    assert not finding.example
    assert finding.hint is not None
    given = tomllib.loads(finding.hint.rpartition("data.dataset.")[2])["classes"]
    assert given == classes
    found = examine(fill, settings | {"classes": given}, full=False)
    assert [str(finding) for finding in found.findings] == []
    assert [found.classes[at] for at in found.labels or []] == labels.split()


def test_numbers_that_are_not_whole_are_no_names_of_classes(tmp_path: Path) -> None:
    assert numbered(tmp_path, "0.0 1.0 0.0 1")[1] == [
        "t.csv: the labels are numbers, but not whole ones: 0.0, 1.0"
    ]
    assert numbered(tmp_path, "v1.0 1.0 2.0 v1.0")[1] == []


def test_numbers_far_apart_are_counted_and_not_walked_through(tmp_path: Path) -> None:
    _, told = numbered(tmp_path, "0 2 30000000000000")
    assert told[0] == (
        "t.csv: the labels skip 1, 3, 4 and 29,999,999,999,995 more, and go up to 30000000000000"
    )


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        ("", "is empty"),
        ("NaN", "is 'NaN', which stands for a missing value"),
        ("nan", "is 'nan', which stands for a missing value"),
        ("NA", "is 'NA', which stands for a missing value"),
        ("null", "is 'null', which stands for a missing value"),
    ],
)
def test_a_label_that_is_missing_is_told_with_its_cell(tmp_path: Path, cell: str, what: str) -> None:
    lay_out(tmp_path, *(f"{at:02}.png" for at in range(5)))
    lines = [f"{at:02}.png,{label}" for at, label in enumerate(["x", cell, "y", "x", "y"])]
    settings = {"table": str(tmp_path / table(tmp_path, *lines, header="path,label"))}
    found, told = check(tmp_path, **settings)
    assert told == [f"t.csv, line 3: the cell 'label' {what}"]
    assert (found.classes, found.bad) == (("x", "y"), {1})
    if cell:
        found, told = check(tmp_path, **settings, classes=["x", "y", cell])
        assert (told, found.labels) == ([], [0, 2, 1, 0, 1])


def test_labels_below_0_are_told_once(tmp_path: Path) -> None:
    assert numbered(tmp_path, "-1 0 1 -1 -1")[1] == ["t.csv: the label -1 is below 0"]


def test_classes_name_numbers_and_say_which_there_are(tmp_path: Path) -> None:
    found, told = numbered(tmp_path, "0 1 3 x 4", classes=["w", "x", "y", "z"])
    assert found.labels == [0, 1, 3, 1, -1]
    assert told == [
        "t.csv, line 6: there is no class '4'",
        ": no image has the class 'y'",
    ]


@pytest.mark.parametrize(
    ("cells", "classes", "found", "wrong"),
    [
        (["0", "1", "2"], ["0", "2"], [0, -1, 1], ["there is no class '1'"]),
        (["1", "2", "3", "0"], ["1", "2", "3"], [0, 1, 2, -1], ["there is no class '0'"]),
        (["0", "20"], ["10", "20"], [-1, 1], ["there is no class '0'"]),
        (["0", "1", "dog"], ["cat", "dog"], [0, 1, 1], []),
    ],
)
def test_a_number_is_a_position_only_where_no_class_is_named_by_one(
    cells: list[str], classes: list[str], found: list[int], wrong: list[str]
) -> None:
    scan = Scan(Path(), classes=tuple(classes), cells=cells, sources=cells)
    assert labels_of_cells(scan) == found
    assert [finding.what for finding in scan.findings] == wrong
