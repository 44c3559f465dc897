from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.yolo_txt import fill, find_names, read_labels, yaml_names, yolo_txt
from tests.unit.data.formats.boxed import (
    HEIGHT,
    OBJECTS,
    WIDTH,
    check_same,
    examined,
    objects_of,
    picture,
    told,
    write_yolo,
    yolo_line,
)
from tests.unit.data.pictures import pixels, write


def looked(folder: Path, **settings: Any) -> tuple[Any, list[str]]:
    return examined(fill, folder, **read_settings(yolo_txt, {"path": str(folder), **settings}, ""))


def labels(tmp_path: Path, text: str | bytes) -> tuple[Any, list[str]]:
    file = tmp_path / "x.txt"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    findings = Findings()
    return read_labels(file, 200, 100, findings), told(findings, tmp_path)


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    data = yolo_txt(tmp_path, False, 0, path=str(write_yolo(tmp_path)), size=(HEIGHT, WIDTH))
    check_same(data)
    assert data.notes[:1] == (
        "1 images have no file of labels, and are read as images without objects: images/train/b.png",
    )


def test_shares_become_edges_in_pixels(tmp_path: Path) -> None:
    found, said = labels(tmp_path, "3 0.5 0.5 1 1\n\n0 0.25 0.2 0.1 0.2\n")
    assert said == []
    assert [box.category for box in found] == [3, 0]
    assert found[0].corners == (0, 0, 200, 100)
    assert found[1].corners == pytest.approx((40, 10, 60, 30))
    assert found[1].where == f"{tmp_path / 'x.txt'}, line 3"


@pytest.mark.parametrize("split_first", [True, False])
def test_folders_of_splits_may_be_inside_or_outside(tmp_path: Path, split_first: bool) -> None:
    for split, names in (("train", "ab"), ("valid", "cd")):
        for name in names:
            kinds = {
                kind: tmp_path / (f"{split}/{kind}" if split_first else f"{kind}/{split}") / "mercy"
                for kind in ("images", "labels")
            }
            picture(kinds["images"] / f"{name}.png", name)
            kinds["labels"].mkdir(parents=True, exist_ok=True)
            text = "\n".join(yolo_line(*marked) for marked in OBJECTS[name])
            (kinds["labels"] / f"{name}.txt").write_text(text)
    (tmp_path / "data.yaml").write_text("train: ../train/images\nnc: 2\nnames: ['cat', 'dog']\n")
    (tmp_path / "README.dataset.txt").write_text("by me")
    found, said = looked(tmp_path)
    assert said == []
    assert (found.classes, found.splits) == (("cat", "dog"), ["train", "train", "validation", "validation"])
    assert np.diff(found.boxes.offsets).tolist() == [2, 0, 1, 1]
    _, said = looked(tmp_path, client_level=1)
    assert said == [
        "DATA: all 4 examples belong to one client, 'mercy'; take another column, level or pattern; "
        "without any of them, a partition makes the clients."
    ]


def test_labels_may_lie_beside_their_images(tmp_path: Path) -> None:
    for name in OBJECTS:
        picture(tmp_path / "obj_data" / f"{name}.png", name)
        text = "\n".join(yolo_line(*marked) for marked in OBJECTS[name])
        (tmp_path / "obj_data" / f"{name}.txt").write_text(text)
    (tmp_path / "train.txt").write_text("obj_data/a.png\n")
    (tmp_path / "obj.names").write_text("cat\ndog\n")
    found, said = looked(tmp_path)
    assert (said, found.classes, found.splits) == ([], ("cat", "dog"), None)
    assert np.diff(found.boxes.offsets).tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "0 0.5 0.5 0.1",
            "it has 4 values, and needs 5: class cx cy width height; correct the line, or remove it",
        ),
        (
            "0 0.5 0.5 0.1 0.1 0.9",
            "it has 6 values, and needs 5: class cx cy width height; remove the sixth; "
            "the output of a model has its confidence there",
        ),
        (
            "0 0.1 0.1 0.2 0.1 0.2 0.2",
            "it has 7 values, and needs 5: class cx cy width height; "
            "it looks like the outline of a mask; export boxes, not segments",
        ),
        (
            "cat 0.5 0.5 0.1 0.1",
            "its class is 'cat', not a number from 0 on; correct the line, or remove it",
        ),
        (
            "-1 0.5 0.5 0.1 0.1",
            "its class is '-1', not a number from 0 on; correct the line, or remove it",
        ),
        (f"{'9' * 5000} 0.5 0.5 0.1 0.1", None),
        ("0 0.5 0,5 0.1 0.1", "'0,5' is not a number; correct the line, or remove it"),
        (
            "0 100 50 20 20",
            "'100' is not a share of the image; it looks like pixels; divide by the width or the height of the image",
        ),
    ],
)
def test_a_line_at_fault_is_named(tmp_path: Path, line: str, said: str | None) -> None:
    found, sentences = labels(tmp_path, f"1 0.5 0.5 0.1 0.1\n{line}\n")
    assert [box.category for box in found] == [1]
    assert len(sentences) == 1
    if said is not None:
        assert sentences == [f"DATA/x.txt, line 2: {said}."]
    assert sentences[0].startswith("DATA/x.txt, line 2: ")


def test_a_file_in_another_encoding_is_named_and_its_image_left_out(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels" / "train" / "a.txt").write_bytes("0 0.5 0.5 0.1 0.1".encode("utf-16"))
    found, said = looked(tmp_path)
    assert said == [
        "DATA/labels/train/a.txt: the file is not UTF-8: byte 1 cannot be read; save it in UTF-8."
    ]
    assert {found.names[row] for row in found.bad} == {"images/train/a.png"}


def test_boxes_are_checked_against_the_image(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    lines = [
        "0 0.5 0.5 0 0.1",
        "1 1.5 0.5 0.1 0.1",
        "0 0.5 0.5 nan 0.1",
        "1 0.95 0.5 0.3 0.5",
        "2 0.5 0.5 1 1",
    ]
    (tmp_path / "labels" / "train" / "a.txt").write_text("\n".join(lines))
    found, said = looked(tmp_path)
    assert said == [
        "DATA/labels/train/a.txt, line 1: its box 0.5, 0.5, 0, 0.1 has no area; "
        "draw it again, or remove the object.",
        "DATA/labels/train/a.txt, line 2: its box 1.5, 0.5, 0.1, 0.1 is outside the image of 16x12; "
        "correct it, or remove the object.",
        "DATA/labels/train/a.txt, line 3: its box 0.5, 0.5, nan, 0.1 has a number that is not finite; "
        "draw it again, or remove the object.",
        "DATA/labels/train/a.txt, line 4: its box 0.95, 0.5, 0.3, 0.5 extends 1.6 pixels beyond the image of "
        "16x12; correct it, or skip errors to cut it off at the edge.",
        "DATA/labels/train/a.txt, line 5: its class 2 is unknown; known: 0, 1.",
    ]
    row = found.names.index("images/train/a.png")
    assert found.boxes.boxes_of(row).ravel() == pytest.approx([12.8, 3, 16, 9])
    assert found.boxes.labels_of(row).tolist() == [1]


def test_numbers_serve_as_names_where_none_is_skipped(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "classes.txt").unlink()
    assert looked(tmp_path)[0].classes == ("0", "1")
    file = tmp_path / "labels" / "train" / "a.txt"
    file.write_text(file.read_text().replace("1 0", "4 0"))
    (tmp_path / "labels" / "test" / "c.txt").write_text("5 0.5 0.5 0.5 0.5\n")
    _, said = looked(tmp_path)
    assert said == [
        "DATA: the labels skip 1, 2, 3, and go up to 5; number the classes from 0 on, or name them all with the "
        "setting classes, or in classes.txt."
    ]
    found, said = looked(tmp_path, classes=list("abcdef"))
    assert (found.classes, said) == (tuple("abcdef"), [])
    with pytest.raises(ConfigError, match="is in 'classes' twice"):
        looked(tmp_path, classes=["a", "a"])


def test_labels_without_an_image_and_images_that_share_labels_are_named(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels" / "train" / "e.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "labels" / "classes.txt").write_text("cat\ndog\n")
    picture(tmp_path / "images" / "test" / "c.jpg", "c")
    found, said = looked(tmp_path)
    assert said == [
        "DATA: images/test/c.jpg and images/test/c.png have the same name, and an annotation can only "
        "belong to one of them; "
        "rename or remove one of them.",
        "DATA/labels/train/e.txt: the labels have no image; add the image, or remove the labels.",
    ]
    assert found.names == ["images/test/d.png", "images/train/a.png", "images/train/b.png"]


def test_images_without_any_labels_are_another_format(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "train" / "a.png", "a")
    _, said = looked(tmp_path)
    assert said == [
        "DATA: no image has a file of labels; that of 'images/train/a.png' would be 'labels/train/a.txt'; "
        "move the labels there."
    ]


def test_labels_that_are_all_empty_are_no_detection(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    for file in (tmp_path / "labels").rglob("*.txt"):
        file.write_text("")
    _, said = looked(tmp_path)
    assert said == [
        "DATA: none of the 4 images has an object; check the format, and the place of the annotations."
    ]


def test_images_outside_the_splits_are_named(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    picture(tmp_path / "images" / "e.png", "e")
    _, said = looked(tmp_path)
    assert said == [
        "DATA: an image is in no split, while others are: images/e.png; move them to a folder train, val or test."
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [cat, 'dog house', \"it's\"]", ["cat", "dog house", "it's"]),
        ("nc: 2\nnames:\n- cat\n- dog-house  # the second\nval: x", ["cat", "dog-house"]),
        ("names:\n  - 'cat # not a comment'\n", ["cat # not a comment"]),
        ("names:\n  1: dog\n\n  0: cat\n", ["cat", "dog"]),
        ("names: {0: cat, 1: 'dog'}", ["cat", "dog"]),
        ("names: [\n  'cat',\n  'dog',\n]\nnc: 2", ["cat", "dog"]),
        ("names: ['it''s', 0]", ["it's", "0"]),
    ],
)
def test_names_in_yaml(text: str, names: list[str]) -> None:
    assert yaml_names(text, "data.yaml") == names


@pytest.mark.parametrize(
    "text",
    ["nc: 1\nnames: [a, [b]]", "nc: 1\nnames: []", "nc: 1\nnames:\n  1: a\n  2: b", "nc: 1\nnames: {0: a, 1 b}",
     "nc: 1\nnames: a", "nc: 1\nnames: [a: b]", "nc: 1\nnames:\n  0: a\n  0: b",
     "nc: 1\nnames: |\n  a", "nc: 1\nnames: [\"a\\n\"]"],
)  # fmt: skip
def test_names_in_more_of_yaml_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"cannot be read \(data.yaml, line 2\); write them as a list"):
        yaml_names(text, "data.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nc: 1\nnames: *x", r"found undefined alias 'x' \(data.yaml, line 2\)"),
        ("nc: 1\nnames: [a,, b]", r"expected the node content, but found ',' \(data.yaml, line 2\)"),
        ("nc: 1\nnames:\n  0: a\n  - b", r"expected <block end>, but found '-' \(data.yaml, line 4\)"),
        ("nc: 1\nnames: [a, b", r"but got '<stream end>' \(data.yaml, line 2\)"),
        ("names: [a\x07]", r"special characters are not allowed \(data.yaml\)"),
        ("names: " + "[" * 5000, r"recursion"),
    ],
)
def test_broken_yaml_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(DataError, match=f"the YAML is invalid: .*{said}.*; write them as a list"):
        yaml_names(text, "data.yaml")


def test_nothing_is_constructed_from_yaml() -> None:
    text = "x: !!python/object/apply:os.abort []\na: &a [b, b]\nnames: &n [yes, 1.0]\ny: *a"
    assert yaml_names(text, "data.yaml") == ["yes", "1.0"]


def test_files_of_names_at_fault_are_named(tmp_path: Path) -> None:
    assert find_names(tmp_path) is None
    (tmp_path / "data.yaml").write_text("nc: 2")
    with pytest.raises(DataError, match="there is no key 'names'"):
        find_names(tmp_path)
    (tmp_path / "data.yaml").write_text("names: [a, a]")
    with pytest.raises(DataError, match="two classes are named 'a'"):
        find_names(tmp_path)
    (tmp_path / "classes.txt").write_text("a\n\nb\n")
    with pytest.raises(DataError, match=r"the line is empty \(.*classes.txt, line 2\)"):
        find_names(tmp_path)
    (tmp_path / "classes.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(
        DataError, match=r"not UTF-8: byte 4 cannot be read \(.*classes.txt\); save it in UTF-8"
    ):
        find_names(tmp_path)
    (tmp_path / "classes.txt").write_bytes("\ufeffcafé\r\nbar\r\n\r\n".encode())
    assert find_names(tmp_path) == ["café", "bar"]


def test_what_is_skipped_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    file = tmp_path / "labels" / "train" / "a.txt"
    file.write_text(f"0 0.5 0.5\n{file.read_text()}")
    with pytest.raises(DataError, match="it has 3 values"):
        yolo_txt(tmp_path, False, 0, path=str(tmp_path), size=16)
    data = yolo_txt(tmp_path, False, 0, path=str(tmp_path), size=(HEIGHT, WIDTH), on_error="skip")
    assert objects_of(data.train.targets, data.classes) == [OBJECTS["a"], []]
    assert sum(note.startswith("skipped ") for note in data.notes) == 1


def test_photographs_with_a_tag_that_turns_them_are_noted(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "images" / "train" / "a.png").unlink()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    write(tmp_path / "images" / "train" / "a.jpg", pixels(1, HEIGHT, WIDTH), exif=exif)
    found, said = looked(tmp_path)
    assert said == []
    assert found.notes[-1] == (
        "1 images have a tag that turns them; boxes are read as pixels of the stored image: "
        "images/train/a.jpg"
    )
    assert found.boxes.boxes_of(found.names.index("images/train/a.jpg")).round(3).tolist()[0] == [
        0,
        0,
        16,
        12,
    ]
