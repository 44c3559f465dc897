"""Images with several labels each, from the cells of a table and the names of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.dataset import Dataset
from fedlens.data.formats.scan import Scan
from fedlens.data.formats.splits import draw_test_of_sets
from tests.unit.data.formats.test_image_folder import check, dataset, lay_out, names, table
from tests.unit.data.pictures import write

CELLS = ("cat;dog", "", " dog ; cat ;", "dog;dog", "cat", "bird", "bird;dog", "cat", "dog", "bird;cat")
SETS = [(1, 2), (), (1, 2), (2,), (1,), (0,), (0, 2), (1,), (2,), (0, 1)]


def cells(root: Path, *labels: str, more: str = "", header: str = "path,label") -> dict[str, Any]:
    """The settings of a table with an image for each label."""
    lay_out(root, *(f"{at:02}.png" for at in range(len(labels))))
    lines = [f'{at:02}.png,"{label}"{more}' for at, label in enumerate(labels)]
    return {"table": str(root / table(root, *lines, header=header)), "separator": ";"}


def sets_of(split: Any) -> dict[str, tuple[int, ...]]:
    rows = [tuple(np.flatnonzero(row).tolist()) for row in split.targets]
    return dict(zip(names(split), rows, strict=True))


def test_a_cell_names_several_classes(tmp_path: Path) -> None:
    settings = cells(tmp_path, *CELLS)
    scan, told = check(tmp_path, **settings)
    assert told == []
    assert scan.classes == ("bird", "cat", "dog")
    assert scan.label_sets == SETS
    made = dataset(tmp_path, **settings)
    assert (made.kind, made.classes) == ("multi-label", ("bird", "cat", "dog"))
    assert made.train.targets.dtype == np.uint8
    everything = sets_of(made.train) | sets_of(made.test)
    assert everything == {f"{at:02}.png": labels for at, labels in enumerate(SETS)}


def test_an_empty_cell_is_none_of_the_classes_and_is_counted(tmp_path: Path) -> None:
    settings = cells(tmp_path, *CELLS)
    scan, _ = check(tmp_path, **settings)
    facts = scan.facts()
    assert facts["classes"] == {"bird": 3, "cat": 5, "dog": 5}
    assert (facts["labels"], facts["without_label"]) == (13, 1)
    expected = (
        "1 cell repeats a class, which counts once",
        "1 image has no label, which counts as none of the classes",
    )
    assert tuple(scan.notes) == expected
    assert set(expected) <= set(dataset(tmp_path, **settings).notes)


def test_an_image_that_is_left_out_is_not_counted_as_one_without_a_label(tmp_path: Path) -> None:
    settings = cells(tmp_path, *CELLS)
    (tmp_path / "01.png").write_bytes(b"no image")
    made = dataset(tmp_path, on_error="skip", **settings)
    assert not any("no label" in note for note in made.notes)


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        ("cat;dgo", "t.csv, line 12: there is no class 'dgo'"),
        ("NaN", "t.csv, line 12: the cell 'label' is 'NaN', which stands for a missing value"),
        ("cat;NA", "t.csv, line 12: there is no class 'NA'"),
        ("7", "t.csv, line 12: there is no class '7'"),
    ],
)
def test_a_cell_that_names_no_class_is_a_problem_of_its_line(tmp_path: Path, cell: str, what: str) -> None:
    settings = cells(tmp_path, *CELLS, cell) | {"classes": ["bird", "cat", "dog"]}
    scan, told = check(tmp_path, **settings)
    assert told == [what]
    assert scan.bad == {10}
    assert len(dataset(tmp_path, on_error="skip", **settings).train) == 8


def test_a_missing_value_is_not_taken_for_no_label(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leave the cell empty for none"):
        dataset(tmp_path, **cells(tmp_path, *CELLS, "nan"))


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    scan, told = check(tmp_path, **cells(tmp_path, "0;2", "1", "10;0", *map(str, range(3, 10))))
    assert told == []
    assert scan.classes == tuple(map(str, range(11)))
    assert scan.label_sets is not None
    assert scan.label_sets[:3] == [(0, 2), (1,), (0, 10)]
    (tmp_path / "gap").mkdir()
    _, told = check(tmp_path / "gap", **cells(tmp_path / "gap", "0;2", "0"))
    assert told == ["t.csv: the labels skip 1, and go up to 2"]


def test_a_class_of_the_setting_needs_images(tmp_path: Path) -> None:
    settings = cells(tmp_path, *CELLS) | {"classes": ["bird", "cat", "dog", "fish"]}
    assert check(tmp_path, **settings)[1] == [": no image has the class 'fish'"]


def test_a_dataset_without_any_label_is_refused(tmp_path: Path) -> None:
    assert check(tmp_path, **cells(tmp_path, "", "", ""))[1] == [": no image has a label"]


def test_splits_and_clients_come_from_the_same_table(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"{at}.png" for at in range(4)))
    lines = ["0.png|a b|mercy|train", "1.png||north|train", "2.png|b|north|test", "3.png|b|mercy|train"]
    written = table(tmp_path, *(line.replace("|", ",") for line in lines), header="path,label,client,split")
    made = dataset(tmp_path, table=str(tmp_path / written), separator=" ")
    assert sets_of(made.train) == {"0.png": (0, 1), "1.png": (), "3.png": (1,)}
    assert sets_of(made.test) == {"2.png": (1,)}
    assert made.train.columns["client"].tolist() == ["mercy", "north", "mercy"]


def test_a_class_with_test_examples_only_is_a_problem(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"{at}.png" for at in range(3)))
    written = table(tmp_path, "0.png,a,train", "1.png,b,train", "2.png,a;c,test", header="path,label,split")
    _, told = check(tmp_path, table=str(tmp_path / written), separator=";")
    assert told == [": the class 'c' has test examples but no training examples"]


def test_the_name_of_a_folder_names_several_classes(tmp_path: Path) -> None:
    lay_out(tmp_path, "cat/0.png", "cat+dog/1.png", "dog/2.png", "dog/3.png")
    scan, told = check(tmp_path, separator="+")
    assert (told, scan.classes) == ([], ("cat", "dog"))
    assert scan.label_sets == [(0, 1), (0,), (1,), (1,)]
    write(tmp_path / "4.png", 4)
    assert check(tmp_path, separator="+")[1] == ["4.png: the image is not in a folder of a class"]


def test_classes_that_look_like_several_are_a_warning(tmp_path: Path) -> None:
    settings = {**cells(tmp_path, *CELLS), "separator": None}
    settings["classes"] = sorted(set(filter(None, (cell.strip() for cell in CELLS))))
    scan, _ = check(tmp_path, **settings)
    (found,) = (str(w) for w in scan.findings.warnings if "looks like several" in w.what)
    assert "the class 'bird;cat' looks like several classes, separated by ';'" in found
    assert 'set data.dataset.separator = ";"' in found


def test_near_names_are_warned_about_with_their_lines(tmp_path: Path) -> None:
    scan, _ = check(tmp_path, **cells(tmp_path, *["horse;dog"] * 9, "dog;hoarse"))
    warnings = [str(warning) for warning in scan.findings.warnings]
    assert any(
        "t.csv, line 11: the class 'hoarse' (1 image) looks like 'horse' (9 images)" in w for w in warnings
    )


def test_the_data_of_one_class_alone_can_be_read(tmp_path: Path) -> None:
    made: Dataset = dataset(tmp_path, **cells(tmp_path, "defect", "", "", "defect", "defect"))
    assert (made.classes, made.kind) == (("defect",), "multi-label")


def test_each_class_keeps_a_training_example_and_gives_its_share_to_the_test_data() -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        labels = (rng.random((60, 5)) < [0.02, 0.05, 0.1, 0.4, 0.7]).astype(np.uint8)
        taken = draw_test_of_sets(labels, None, 0.3, seed)
        used = labels.any(axis=0)
        assert labels[~taken].any(axis=0)[used].all()
        assert abs(int(taken.sum()) - 18) <= 6
    labels = np.repeat(np.eye(2, dtype=np.uint8), 50, axis=0)
    clients = np.tile(["a", "b"], 50)
    taken = draw_test_of_sets(labels, clients, 0.2, 3)
    assert labels[taken].sum(axis=0).tolist() == [10, 10]
    assert sorted(clients[taken].tolist()) == ["a"] * 10 + ["b"] * 10


def test_a_class_that_never_is_the_rarest_keeps_a_training_example() -> None:
    labels = np.array(
        [[1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0]], np.uint8
    )  # the third is never drawn by itself
    for seed in range(30):
        assert labels[~draw_test_of_sets(labels, None, 0.5, seed)].any(axis=0).all()


def test_the_scan_of_other_formats_has_no_sets(tmp_path: Path) -> None:
    assert Scan(tmp_path).labels_of_rows() is None
