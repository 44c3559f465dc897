from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.datasets.bccd import bccd
from fedlens.data.datasets.voc_files import read_ids
from tests.unit.data.datasets.voc_layout import write_annotated, write_list

ROWS = {
    # 40x20 images; the corners are pixels counted from 1.
    "a": [("WBC", 11, 3, 20, 12), ("RBC", 1, 1, 40, 20)],
    "b": [("Platelets", 5, 5, 5, 9), ("RBC", 2, 3, 4, 5)],
    "c": [],
    "d": [("Platelets", 31, 11, 44, 26), ("RBC", 9, 9, 2, 12)],
    "e": [("RBC", 1, 1, 2, 2)],
}
SPLITS = {"train": ["b", "a"], "val": ["c"], "test": ["e", "d"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, boxes in ROWS.items():
        write_annotated(tmp_path / "BCCD", name, 40, 20, boxes)
    for split, ids in {**SPLITS, "trainval": ["a", "b", "c"]}.items():
        write_list(tmp_path / "BCCD", "Main", split, ids)
    return tmp_path


def test_boxes_become_edges_counted_from_0_and_stand_with_their_images(root: Path) -> None:
    data = bccd(root, False, 0, size=(20, 40))
    assert (data.kind, data.input_shape, data.classes) == (
        "detection",
        (3, 20, 40),
        ("RBC", "WBC", "Platelets"),
    )
    assert data.train.columns["image"].tolist() == ["b", "a", "c"]
    boxes = data.train.targets
    assert boxes.offsets.tolist() == [0, 1, 3, 3]
    assert boxes.boxes_of(0).tolist() == [[1, 2, 4, 5]]
    assert boxes.boxes_of(1).tolist() == [[10, 2, 20, 12], [0, 0, 40, 20]]
    assert boxes.labels.tolist() == [0, 1, 0]
    # Of the test split one box reaches over the edge, and is cut off there.
    assert data.test.columns["image"].tolist() == ["e", "d"]
    assert data.test.targets.boxes.tolist() == [[0, 0, 2, 2], [30, 10, 40, 20]]
    assert data.test.targets.labels.tolist() == [0, 2]


def test_boxes_without_area_are_left_out_and_counted(root: Path) -> None:
    what = "objects left out because the corners of their box coincide: 1"
    assert bccd(root, False, 0).notes == (f"train, {what}", f"test, {what}")
    write_annotated(root / "BCCD", "c", 40, 20, [("RBC", 41, 1, 50, 9), ("RBC", 1, 1, 9, 9)])
    data = bccd(root, False, 0)
    assert "train, objects left out because their box has no area in the image: 1" in data.notes
    assert data.train.targets.labels_of(2).tolist() == [0]


def test_the_published_validation_split_joins_training_or_is_left(root: Path) -> None:
    assert bccd(root, False, 0, val="leave").train.columns["image"].tolist() == ["b", "a"]
    assert len(bccd(root, False, 0).train) == 3


def test_images_and_boxes_are_scaled_together(root: Path) -> None:
    data = bccd(root, False, 0, size=20)
    assert data.input_shape == (3, 20, 20)
    # 40x20 padded into 20x20: half the size, 5 rows of black above and below.
    assert data.train.targets.boxes_of(1).tolist() == [[5, 6, 10, 11], [0, 5, 20, 15]]
    pixels = data.train.inputs.take(np.array([1]))[0]
    assert not pixels[:, :5].any()
    assert not pixels[:, 15:].any()
    assert pixels[:, 5:15].any()
    stretched = bccd(root, False, 0, size=20, fit="stretch").train.targets
    assert stretched.boxes_of(1).tolist() == [[5, 2, 10, 12], [0, 0, 20, 20]]
    cropped = bccd(root, False, 0, size=(20, 20), fit="crop")
    # The middle: columns 10 to 30. The box at 1..4 is outside; the large one is cut off.
    assert cropped.train.targets.boxes_of(1).tolist() == [[0, 2, 10, 12], [0, 0, 20, 20]]
    assert cropped.train.targets.boxes_of(0).tolist() == []
    assert "train, objects left out because the crop cuts their centre off: 1" in cropped.notes


def test_the_table_counts_each_class_once_an_image(root: Path) -> None:
    write_annotated(
        root / "BCCD", "a", 40, 20, [("WBC", 1, 1, 9, 9), ("RBC", 1, 1, 9, 9), ("WBC", 5, 5, 9, 9)]
    )
    table = bccd(root, False, 0).table()
    assert (table.marks.tolist(), table.offsets.tolist(), table.single) == ([0, 0, 1], [0, 1, 3, 3], False)


@pytest.mark.parametrize(
    ("file", "old", "new", "what", "line"),
    [
        (
            "Annotations/a.xml",
            "<name>WBC</name>",
            "<name>wbc</name>",
            "its class 'wbc' is unknown (did you mean 'WBC')",
            15,
        ),
        ("Annotations/a.xml", "<xmin>11</xmin>", "<xmin>x</xmin>", "<xmin> is 'x', not a number", 17),
        ("Annotations/a.xml", "<xmin>11</xmin>", "<xmin>nan</xmin>", "<xmin> is 'nan', not a number", 17),
        ("Annotations/a.xml", "<ymax>12</ymax>", "", "<ymax> is missing", 15),
        (
            "Annotations/a.xml",
            "<width>40</width>",
            "<width>0</width>",
            "<width> is '0', not a whole number from 1 on",
            5,
        ),
        ("Annotations/a.xml", "</annotation>", "", "Premature end of data in tag annotation", None),
        ("ImageSets/Main/test.txt", "e\n", "e 1\n", "one name was expected, found 'e 1'", 1),
        ("ImageSets/Main/test.txt", "e\n", "e\n\nd\n", "'d' is in line 3 too", 4),
        ("ImageSets/Main/test.txt", "e\nd\n", "\n", "the list is empty", None),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    root: Path, file: str, old: str, new: str, what: str, line: int | None
) -> None:
    path = root / "BCCD" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        bccd(root, False, 0)
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(str(path))
    if line is not None:
        assert caught.value.where.endswith(f", line {line}")
    assert caught.value.hint is not None
    assert "the published one: remove it" in caught.value.hint


def test_all_problems_of_the_annotations_are_reported_at_once(root: Path) -> None:
    folder = root / "BCCD" / "Annotations"
    for name, old, new in (("a", "<xmin>11</xmin>", "<xmin>x</xmin>"), ("b", "size>", "length>")):
        text = (folder / f"{name}.xml").read_text()
        (folder / f"{name}.xml").write_text(text.replace(old, new))
    with pytest.raises(DataError, match=r"<xmin> is 'x'") as caught:
        bccd(root, False, 0)
    assert "b.xml: it does not state the <size> of its image" in caught.value.what
    assert (
        caught.value.hint == "the file is corrupt or not the published one: remove it and download it again"
    )


def test_files_that_are_not_there_are_counted(root: Path) -> None:
    for name in ("a", "c"):
        (root / "BCCD" / "JPEGImages" / f"{name}.jpg").unlink()
    with pytest.raises(
        DataError, match=r"2 of the 3 images in the list are not below .*, the first is JPEGImages/a.jpg"
    ):
        bccd(root, False, 0)
    (root / "BCCD" / "ImageSets" / "Main" / "val.txt").unlink()
    with pytest.raises(DataError, match=r"clone github.com/Shenggan/BCCD_Dataset"):
        bccd(root, True, 0)


def test_an_image_in_both_splits_is_a_leak(root: Path) -> None:
    write_list(root / "BCCD", "Main", "test", ["e", "a", "b"])
    with pytest.raises(
        DataError, match="2 images are for training and for testing, the first is a"
    ) as caught:
        bccd(root, False, 0)
    assert caught.value.hint == "the folder is not the published one: remove it and download it again"


def test_corners_with_decimals_are_rounded_before_they_are_counted_from_0(root: Path) -> None:
    write_annotated(root / "BCCD", "e", 40, 20, [("RBC", 32.6, 2, 39, 8)])
    boxes = bccd(root, False, 0, size=(20, 40)).test.targets
    assert boxes.boxes_of(0)[0, 0] == np.float32(32.6) - np.float32(1)
    assert np.float32(32.6) - np.float32(1) != np.float32(32.6 - 1)


def test_names_of_a_list_may_end_in_blanks(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"2007_000032 \r\n2007_000039\n\n")
    assert read_ids(tmp_path / "x.txt") == ["2007_000032", "2007_000039"]


def test_settings() -> None:
    read = read_settings(bccd, {"size": [96, 128], "fit": "crop", "val": "leave"}, "data.dataset")
    assert read == {"size": (96, 128), "fit": "crop", "val": "leave"}
    assert read_settings(bccd, {}, "")["size"] == (480, 640)
    for wrong in (0, [64], [64, 0], "64", True, 2.5, [64, 64, 3]):
        with pytest.raises(ConfigError, match="one number of pixels, or"):
            read_settings(bccd, {"size": wrong}, "data.dataset")
