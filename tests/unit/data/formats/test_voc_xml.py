from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.voc_xml import fill, read_annotation, voc_xml
from tests.unit.data.datasets.voc_layout import xml as published_xml
from tests.unit.data.formats.boxed import (
    CLASSES,
    HEIGHT,
    OBJECTS,
    WIDTH,
    check_same,
    examined,
    objects_of,
    picture,
    told,
    write_voc,
    xml,
)


def looked(folder: Path, **settings: Any) -> tuple[Any, list[str]]:
    return examined(fill, folder, **read_settings(voc_xml, {"path": str(folder), **settings}, ""))


def annotation(tmp_path: Path, text: str | bytes, first_pixel: int = 1) -> tuple[Any, list[str]]:
    file = tmp_path / "x.xml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    findings = Findings()
    return read_annotation(file, findings, first_pixel), told(findings, tmp_path)


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    check_same(voc_xml(tmp_path, False, 0, path=str(write_voc(tmp_path)), size=(HEIGHT, WIDTH)))


def test_pixels_counted_from_1_become_edges_counted_from_0(tmp_path: Path) -> None:
    numbers = "<xmin>1</xmin><ymin>2</ymin><xmax>640</xmax><ymax>480</ymax>"
    text = f"<annotation><object><name>cat</name><bndbox>{numbers}</bndbox></object></annotation>"
    found, said = annotation(tmp_path, text)
    assert (found.objects[0].corners, said) == ((0, 1, 640, 480), [])
    assert found.objects[0].where == f"{tmp_path / 'x.xml'}, line 1"
    found, said = annotation(tmp_path, text, first_pixel=0)
    assert (found.objects[0].corners, said) == ((1, 2, 640, 480), [])


def test_difficult_objects_and_parts_of_objects_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(
        published_xml("x", 40, 20, [("person", 4.5, 2, 9.25, 8), ("cat", 1, 1, 5, 5)], difficult=[0])
    )
    whole = read_annotation(tmp_path / "x.xml", Findings(), 0)
    some = read_annotation(tmp_path / "x.xml", Findings(), 0, difficult=False)
    assert whole is not None
    assert some is not None
    assert [one.corners for one in whole.objects] == [(4.5, 2, 9.25, 8), (1, 1, 5, 5)]
    assert ([one.category for one in some.objects], some.difficult, whole.difficult) == (["cat"], 1, 1)


def test_boxes_move_with_the_pixels(tmp_path: Path) -> None:
    # 16 x 12 padded to 32 x 32: twice as large, and 4 pixels down.
    data = voc_xml(tmp_path, False, 0, path=str(write_voc(tmp_path)), size=32)
    moved = [("cat", (0, 4, 32, 28)), ("dog", (4, 10, 20, 22))]
    assert objects_of(data.train.targets, data.classes)[0] == moved
    # Its middle 12 x 12, cut out: 2 pixels to the left.
    data = voc_xml(tmp_path, False, 0, path=str(tmp_path), size=12, fit="crop")
    assert objects_of(data.train.targets, data.classes)[0] == [("cat", (0, 0, 12, 12)), ("dog", (0, 3, 8, 9))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "DATA/x.xml: the file is empty; write it again, or remove it."),
        (
            "<annotation>\n<object>\n</annotation>",
            "DATA/x.xml, line 3: the XML is invalid: Opening and ending tag mismatch: object line 2 "
            "and annotation (column 14); write the file again, in UTF-8.",
        ),
        (
            "<annotation>\n<object>\n",
            "DATA/x.xml, line 3: the XML is invalid: Premature end of data in tag object line 2 (column 1); "
            "write the file again, in UTF-8.",
        ),
        (
            "<!DOCTYPE a [<!ENTITY b 'c'>]>\n<annotation>&b;</annotation>",
            "DATA/x.xml, line 1: it has a document type declaration (<!DOCTYPE>), which is not allowed; "
            "remove the declaration.",
        ),
        (
            b'<?xml version="1.0" encoding="nonesuch"?><annotation/>',
            "DATA/x.xml, line 1: the XML is invalid: Unsupported encoding: nonesuch (column 40); "
            "write the file again, in UTF-8.",
        ),
        (
            "\n<html></html>",
            "DATA/x.xml, line 2: the root element is <html>, not <annotation>; export it in the format of "
            "Pascal VOC.",
        ),
    ],
)
def test_a_file_that_is_no_annotation_is_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    assert annotation(tmp_path, text) == (None, [said])


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (
            "<object>\n<name> </name>\n</object>",
            "DATA/x.xml, line 2: the object has no <name>; name its class, or remove the object.",
        ),
        (
            "<object><name>cat</name></object>",
            "DATA/x.xml, line 2: the object 'cat' has no <bndbox>; draw its box, or remove the object.",
        ),
        (
            "<object><name>cat</name>\n<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax></bndbox></object>",
            "DATA/x.xml, line 3: <ymax> is missing; correct the number, or remove the object.",
        ),
        (
            "<object><name>cat</name>\n<bndbox><xmin>1</xmin>\n<ymin>two</ymin><xmax>3</xmax><ymax>4</ymax>"
            "</bndbox></object>",
            "DATA/x.xml, line 4: <ymin> is 'two', not a number; correct the number, or remove the object.",
        ),
        (
            "<object><name>cat</name><bndbox><xmin>nan</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax>"
            "</bndbox></object>",
            "DATA/x.xml, line 2: <xmin> is 'nan', not a number; correct the number, or remove the object.",
        ),
        (
            "<size><width>0</width><height>4</height></size>",
            "DATA/x.xml, line 2: <width> is '0', not a whole number from 1 on; "
            "write the pixels of the image, or remove <size>.",
        ),
        (
            "<size>\n<width>5</width>\n<height>4.5</height></size>",
            "DATA/x.xml, line 4: <height> is '4.5', not a whole number from 1 on; "
            "write the pixels of the image, or remove <size>.",
        ),
        (
            "<size><width>5</width></size>",
            "DATA/x.xml, line 2: <height> is missing; write the pixels of the image, or remove <size>.",
        ),
    ],
)
def test_what_is_wrong_inside_is_named_with_its_line(tmp_path: Path, inside: str, said: str) -> None:
    good = "<object><name>dog</name><bndbox>" + "".join(
        f"<{side}>{n}</{side}>" for side, n in (("xmin", 1), ("ymin", 1), ("xmax", 2), ("ymax", 2))
    )
    text = f"<annotation>\n{inside}\n{good}</bndbox></object></annotation>"
    found, sentences = annotation(tmp_path, text)
    assert sentences == [said]
    assert [box.category for box in found.objects] == ["dog"]


def test_parts_of_an_object_are_not_objects(tmp_path: Path) -> None:
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox>"
    part = f"<part><name>head</name>{box.replace('5', '3')}</part>"
    found, said = annotation(
        tmp_path, f"<annotation><object><name>cat</name>{part}{box}</object></annotation>"
    )
    assert [(one.category, one.corners) for one in found.objects] == [("cat", (0, 0, 5, 5))]
    assert said == []


def test_an_object_of_one_pixel_has_no_area(tmp_path: Path) -> None:
    write_voc(tmp_path, {**OBJECTS, "a": [("cat", (2, 3, 3, 9)), ("dog", (2, 3, 4, 9))]})
    found, said = looked(tmp_path)
    assert said == [
        "DATA/Annotations/a.xml, line 7: its box 3, 4, 3, 9 has no area; draw it again, or remove the object."
    ]
    assert found.boxes.boxes_of(0).tolist() == [[2, 3, 4, 9]]


def test_a_tool_that_counts_from_0_is_told_of(tmp_path: Path) -> None:
    write_voc(tmp_path, {**OBJECTS, "a": [("cat", (-1, 3, 7, 9))]})
    found, said = looked(tmp_path)
    assert said == [
        "DATA/Annotations/a.xml, line 7: its box 0, 4, 7, 9 extends 1 pixel beyond the image of 16x12; "
        "correct it, or skip errors to cut it off at the edge."
    ]
    found, said = looked(tmp_path, first_pixel=0)
    assert (found.boxes.boxes_of(0).tolist(), said) == ([[0, 4, 7, 9]], [])


def test_difficult_objects_are_kept_and_noted(tmp_path: Path) -> None:
    write_voc(tmp_path)
    file = tmp_path / "Annotations" / "a.xml"
    file.write_text(file.read_text().replace("<difficult>0", "<difficult>1", 1))
    found, said = looked(tmp_path)
    assert (found.notes, said) == (["1 objects are marked difficult, and kept"], [])
    assert len(found.boxes.boxes_of(0)) == 2


def test_classes_may_be_given_and_then_are_all_there_may_be(tmp_path: Path) -> None:
    found, said = looked(write_voc(tmp_path), classes=["bird", "dog"])
    assert found.classes == ("bird", "dog")
    assert said == [
        f"DATA/Annotations/{name}.xml, line 7: its class 'cat' is unknown; known: bird, dog." for name in "ad"
    ]
    assert [labels.tolist() for labels in map(found.boxes.labels_of, range(4))] == [[1], [], [1], []]
    with pytest.raises(ConfigError, match="is in 'classes' twice"):
        looked(tmp_path, classes=["dog", "dog"])


def test_images_and_annotations_may_lie_side_by_side_in_folders_of_splits(tmp_path: Path) -> None:
    for split, names in (("train", "ab"), ("valid", "c"), ("test", "d")):
        for name in names:
            picture(tmp_path / split / f"{name}.png", name)
            (tmp_path / split / f"{name}.xml").write_text(xml(name, OBJECTS[name]))
    found, said = looked(tmp_path, images=".", annotations=".")
    assert said == []
    assert found.names == ["test/d.png", "train/a.png", "train/b.png", "valid/c.png"]
    assert found.splits == ["test", "train", "train", "validation"]


def test_without_lists_or_folders_a_share_is_held_out(tmp_path: Path) -> None:
    write_voc(tmp_path)
    for file in (tmp_path / "ImageSets" / "Main").iterdir():
        file.unlink()
    found, said = looked(tmp_path)
    assert (found.splits, said, len(found.names)) == (None, [], 4)
    data = voc_xml(tmp_path, False, 0, path=str(tmp_path), size=16, test=0.25)
    assert (len(data.train), len(data.test), data.classes) == (3, 1, CLASSES)


def test_the_lists_are_those_of_voc(tmp_path: Path) -> None:
    write_voc(tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    (lists / "train.txt").write_text("a\n")
    (lists / "val.txt").write_text("b\n")
    (lists / "trainval.txt").write_text("a\nb\n")
    assert looked(tmp_path)[0].splits == ["train", "test", "test", "validation"]
    assert looked(tmp_path, train_list="trainval")[0].splits == ["train", "train", "test", "test"]
    (lists / "train.txt").unlink()
    assert looked(tmp_path)[0].splits == ["train", "train", "test", "test"]
    _, said = looked(tmp_path, train_list="train")
    assert said[0] == "DATA/ImageSets/Main: there is no list 'train.txt'; add it, or leave train_list out."


def test_a_client_is_a_folder_below_the_images_or_stands_in_a_table(tmp_path: Path) -> None:
    for name, site in zip(OBJECTS, ("mercy", "mercy", "north", "north"), strict=True):
        picture(tmp_path / "JPEGImages" / site / f"{name}.png", name)
        (tmp_path / "Annotations" / site).mkdir(parents=True, exist_ok=True)
        (tmp_path / "Annotations" / site / f"{name}.xml").write_text(xml(name, OBJECTS[name]))
    found, said = looked(tmp_path, client_level=1)
    assert said == []
    assert found.columns["client"].tolist() == ["mercy", "mercy", "north", "north"]
    sites = {"a": "mercy", "b": "mercy", "c": "north", "d": "north"}
    lines = [f"JPEGImages/{site}/{name}.png,{name}{site}\n" for name, site in sites.items()]
    (tmp_path / "sites.csv").write_text("path,hospital\n" + "".join(lines))
    found, said = looked(tmp_path, table="sites.csv", client_column="hospital")
    assert said == []
    assert found.columns["client"].tolist() == ["amercy", "bmercy", "cnorth", "dnorth"]


def test_what_does_not_match_is_named(tmp_path: Path) -> None:
    write_voc(tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    (lists / "train.txt").write_text("a\nb\nb\n\ne\n")
    (tmp_path / "Annotations" / "b.xml").unlink()
    picture(tmp_path / "JPEGImages" / "c.jpg", "c")
    _, said = looked(tmp_path)
    assert said == [
        "DATA/ImageSets/Main/train.txt, line 3: 'b' is in line 2 too; remove one of the lines.",
        "DATA/ImageSets/Main/train.txt, line 5: there is no image 'e' in JPEGImages; "
        "add the image, or remove the line.",
        "DATA/JPEGImages: c.jpg and c.png have the same name, and an annotation can only belong to one of them; "
        "rename or remove one of them.",
        "DATA/JPEGImages/b.png: the image has no 'b.xml' in Annotations; "
        "write one, without any <object> if it shows none, or remove the image.",
    ]
    with pytest.raises(DataError, match="4 problems in the data"):
        voc_xml(tmp_path, False, 0, path=str(tmp_path), size=16)


def test_an_annotation_without_an_image_is_named(tmp_path: Path) -> None:
    write_voc(tmp_path)
    for file in (tmp_path / "ImageSets" / "Main").iterdir():
        file.unlink()
    (tmp_path / "JPEGImages" / "d.png").unlink()
    _, said = looked(tmp_path)
    assert said == [
        "DATA/Annotations/d.xml: the annotation has no image 'd' in JPEGImages; "
        "add the image, or remove the annotation."
    ]


def test_a_file_name_that_is_another_image_is_a_contradiction(tmp_path: Path) -> None:
    write_voc(tmp_path)
    file = tmp_path / "Annotations" / "a.xml"
    text = file.read_text()
    file.write_text(text.replace("a.png", "IMG_0001.JPG"))  # an old name does no harm
    assert looked(tmp_path)[1] == []
    file.write_text(text.replace("a.png", "C:\\scans\\d.png"))
    found, said = looked(tmp_path)
    assert said == [
        "DATA/Annotations/a.xml: <filename> is 'C:\\scans\\d.png', which is another image than 'a.png'; "
        "check which of the two the boxes belong to, and give both files one name."
    ]
    assert found.bad == {0}


def test_a_size_that_is_not_the_images_is_named(tmp_path: Path) -> None:
    write_voc(tmp_path)
    (tmp_path / "Annotations" / "a.xml").write_text(xml("a", OBJECTS["a"], size=(HEIGHT, WIDTH)))
    (tmp_path / "Annotations" / "b.xml").write_text(xml("b", OBJECTS["b"], size=(15, 12)))
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_text("a\nb\nd\n")
    (tmp_path / "ImageSets" / "Main" / "test.txt").write_text("c\n")
    found, said = looked(tmp_path)
    assert said == [
        "DATA/Annotations/a.xml: the stated size is 12 x 16 pixels, and the image is 16 x 12: 'JPEGImages/a.png'; "
        "store the image turned as it was annotated, without the EXIF tag that turns it.",
        "DATA/Annotations/b.xml: the stated size is 15 x 12 pixels, and the image is 16 x 12: 'JPEGImages/b.png'; "
        "annotate the image as it is stored.",
    ]
    assert found.bad == {0, 1}


def test_folders_that_are_not_there_are_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    _, said = looked(tmp_path)
    assert said == [
        "DATA: there is no folder 'JPEGImages' for the images; "
        "name it with the setting images; its folders are: pictures.",
        "DATA: there is no folder 'Annotations' for the annotations; "
        "name it with the setting annotations; its folders are: pictures.",
    ]
    (tmp_path / "pictures").rmdir()
    assert all(sentence.endswith("; it has no folders.") for sentence in looked(tmp_path)[1])


def test_what_is_skipped_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_voc(tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    (lists / "train.txt").write_text("a\nb\nd\n")
    (lists / "test.txt").write_text("c\n")
    (tmp_path / "Annotations" / "a.xml").write_text("<annotation>")
    file = tmp_path / "Annotations" / "d.xml"
    file.write_text(file.read_text().replace("<xmin>2<", "<xmin>9<"))
    with pytest.raises(DataError) as stopped:
        voc_xml(tmp_path, False, 0, path=str(tmp_path), size=16)
    assert "a.xml, line 1: the XML is invalid" in str(stopped.value)
    assert "d.xml, line 7: its box 9, 3, 3, 5 has no area" in str(stopped.value)
    data = voc_xml(tmp_path, False, 0, path=str(tmp_path), size=(HEIGHT, WIDTH), on_error="skip")
    assert (len(data.train), len(data.test)) == (2, 1)
    assert objects_of(data.train.targets, data.classes) == [[], []]
    assert sum(note.startswith("skipped ") for note in data.notes) == 2
    assert "left out 1 of 4 images" in data.notes


def test_a_table_goes_before_the_lists_and_its_faults_leave_images_out(tmp_path: Path) -> None:
    write_voc(tmp_path)
    cells = {"a": "mercy,test", "b": "north,train", "c": ",train", "d": "mercy,train"}
    lines = [f"JPEGImages/{name}.png,{rest}\n" for name, rest in cells.items()]
    (tmp_path / "t.csv").write_text("path,client,split\n" + "".join(lines))
    found, said = looked(tmp_path, table="t.csv")
    assert dict(zip(found.names, found.splits, strict=True)) == {
        "JPEGImages/a.png": "test",
        "JPEGImages/b.png": "train",
        "JPEGImages/c.png": "train",
        "JPEGImages/d.png": "train",
    }
    assert said == ["DATA/t.csv, line 4: the cell 'client' is empty; write the client of the image."]
    assert [found.names[row] for row in found.bad] == ["JPEGImages/c.png"]
