from __future__ import annotations

import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.coco_json import coco_json, fill, read_instances
from fedlens.data.formats.reader import examine
from fedlens.data.formats.registry import FORMATS
from tests.unit.data.formats.boxed import (
    HEIGHT,
    OBJECTS,
    WIDTH,
    check_same,
    examined,
    instances,
    objects_of,
    picture,
    told,
    write_coco,
    write_voc,
    xml,
)
from tests.unit.data.pictures import pixels, write

Change = Callable[[dict[str, Any]], object]


def looked(folder: Path, **settings: Any) -> tuple[Any, list[str]]:
    return examined(fill, folder, **read_settings(coco_json, {"path": str(folder), **settings}, ""))


def parsed(tmp_path: Path, content: Any) -> tuple[Any, list[str]]:
    file = tmp_path / "x.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    findings = Findings()
    found = read_instances(file, findings)
    return found, told(findings, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [("images", "file_name", "it has no 'file_name'"), ("categories", "name", "it has no name")],
)
def test_an_invalid_entry_does_not_reserve_its_id(tmp_path: Path, kind: str, name: str, problem: str) -> None:
    content = instances("ab")
    content[kind].insert(0, {**content[kind][0], name: ""})
    _, sentences = parsed(tmp_path, content)
    assert len(sentences) == 1
    assert problem in sentences[0]


def test_a_file_for_each_split_is_found_by_its_name(tmp_path: Path) -> None:
    write_coco(tmp_path)
    check_same(coco_json(tmp_path, False, 0, path=str(tmp_path), size=(HEIGHT, WIDTH)))
    files = {"train": "train.json", "test": "test.json"}
    check_same(
        coco_json(
            tmp_path,
            False,
            0,
            path=str(tmp_path),
            size=(HEIGHT, WIDTH),
            annotations=files,
            images="images",
        )
    )
    other = {"train": "test.json", "test": "train.json"}
    found, said = looked(tmp_path, annotations=other)
    assert found.names == [f"images/{name}.png" for name in "cdab"]
    assert (found.splits, said) == (["train", "train", "test", "test"], [])


@pytest.mark.parametrize(
    ("tag", "size", "stated", "noted"),
    [
        (6, (16, 12), None, True),
        (6, (16, 12), (16, 12), False),  # it was annotated as it is stored
        (3, (16, 12), (16, 12), True),  # turned by half a circle it has the same size
        (6, (12, 12), (12, 12), True),
        (1, (16, 12), None, False),
        (0, (12, 12), None, False),  # not a value that the tag may have
    ],
)
@pytest.mark.parametrize("format", ["coco-json", "voc-xml"])
def test_photographs_with_a_tag_that_turns_them_are_noted(
    tmp_path: Path, format: str, tag: int, size: tuple[int, int], stated: Any, noted: bool
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = tag
    folder = tmp_path / ("JPEGImages" if format == "voc-xml" else "images")
    if format == "voc-xml":
        write_voc(tmp_path)
        text = xml("a", [("cat", (0, 0, 5, 5))], stated or (0, 0))
        text = text if stated else re.sub("<size>.*</size>", "", text)
        (tmp_path / "Annotations" / "a.xml").write_text(text)
    else:

        def change(content: dict[str, Any]) -> None:
            entry, sides = content["images"][0], stated or (None, None)
            entry["file_name"] = "a.jpg"
            content["annotations"] = content["annotations"][:1]
            content["annotations"][0]["bbox"] = [0, 0, 5, 5]
            entry.update(zip(("width", "height"), sides, strict=True))
            if stated is None:
                del entry["width"], entry["height"]

        write_coco(tmp_path, change)
    (folder / "a.png").unlink()
    write(folder / "a.jpg", pixels(1, size[1], size[0]), exif=exif)
    found = examine(
        FORMATS[format].fill(),
        read_settings(FORMATS[format].reader(), {"path": str(tmp_path)}, ""),
        full=False,
    )
    assert told(found.findings, tmp_path) == []
    sentence = "1 images have a tag that turns them; boxes are read as pixels of the stored image: "
    assert found.notes == [f"{sentence}{folder.name}/a.jpg"] * noted


def test_the_published_layout_is_found(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for split, names in (("train2017", "ab"), ("val2017", "cd")):
        content = instances(names)
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
        (tmp_path / "annotations" / f"captions_{split}.json").write_text("{}")
        for name in names:
            picture(tmp_path / split / f"{name}.png", name)
    found, said = looked(tmp_path)
    assert said == []
    assert found.names == ["train2017/a.png", "train2017/b.png", "val2017/c.png", "val2017/d.png"]
    assert found.splits == ["train", "train", "validation", "validation"]
    data = coco_json(tmp_path, False, 0, path=str(tmp_path), size=(HEIGHT, WIDTH))
    check_same(data)
    assert any("split 'validation'" in note for note in data.notes)


def test_a_file_beside_its_images_is_found(tmp_path: Path) -> None:
    for split, names in (("train", "ab"), ("test", "cd")):
        for name in names:
            picture(tmp_path / split / f"{name}.png", name)
        (tmp_path / split / "_annotations.coco.json").write_text(json.dumps(instances(names)))
    check_same(coco_json(tmp_path, False, 0, path=str(tmp_path), size=(HEIGHT, WIDTH)))


def test_one_file_has_no_splits_unless_its_images_say_so(tmp_path: Path) -> None:
    for name in OBJECTS:
        picture(tmp_path / f"{name}.png", name)
    file = tmp_path / "all.json"
    file.write_text(json.dumps(instances("abcd")))
    found, said = looked(tmp_path)
    assert (found.splits, said) == (None, [])
    splits = {"a": "train", "b": "train", "c": "val", "d": "test"}
    file.write_text(json.dumps(instances("abcd", split=splits)))
    found, said = looked(tmp_path)
    assert (found.splits, said) == (["train", "train", "validation", "test"], [])


def test_ids_of_classes_may_skip_and_labels_do_not(tmp_path: Path) -> None:
    found, said = parsed(tmp_path, instances("abcd"))
    assert (found.categories, said) == ({3: "cat", 7: "dog"}, [])
    assert list(found.categories) == [3, 7]
    data = coco_json(tmp_path, False, 0, path=str(write_coco(tmp_path / "data")), size=16)
    assert data.classes == ("cat", "dog")
    assert data.train.targets.labels.tolist() == [0, 1]


def test_crowds_are_left_out_and_counted(tmp_path: Path) -> None:
    def crowd(content: dict[str, Any]) -> None:
        content["annotations"][1]["iscrowd"] = 1

    found, said = looked(write_coco(tmp_path, crowd))
    assert said == []
    assert found.notes == ["1 annotations of crowds are left out"]
    labels = [found.boxes.labels_of(row).tolist() for row in range(4)]
    assert labels == [[1], [0], [0], []]  # test.json is the first


def test_a_client_may_be_a_field_of_the_images(tmp_path: Path) -> None:
    hospitals = {"a": "mercy", "b": "north", "c": "mercy", "d": "north"}
    for name in OBJECTS:
        picture(tmp_path / f"{name}.png", name)
    ages = {"a": 30, "b": 41, "c": 52, "d": 63}
    content = instances("abcd", hospital=hospitals, age=ages, extra={name: {"x": 1} for name in "abcd"})
    (tmp_path / "all.json").write_text(json.dumps(content))
    found, said = looked(tmp_path, client_column="hospital")
    assert said == []
    assert found.columns["client"].tolist() == ["mercy", "north", "mercy", "north"]
    assert found.columns["hospital"].tolist() == ["mercy", "north", "mercy", "north"]
    assert found.columns["age"].tolist() == [30, 41, 52, 63]
    assert set(found.columns) == {"client", "hospital", "age"}
    with pytest.raises(ConfigError, match=r"no column 'hospitl' \(client_column\); did you mean 'hospital'"):
        looked(tmp_path, client_column="hospitl")


def put(*path: str | int, value: Any) -> Change:
    """A change that puts a value somewhere into the content; `...` takes it out."""

    def change(content: Any) -> None:
        *way, last = path
        for step in way:
            content = content[step]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return change


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"",
            "DATA/x.json, line 1, column 1: the file is not valid JSON: expecting value; export the file again.",
        ),
        (
            b'{"images": [],\n "annotations": [}',
            "DATA/x.json, line 2, column 18: the file is not valid JSON: expecting value; export the file again.",
        ),
        (
            b'{"images": "\xff"}',
            "DATA/x.json: the file is not UTF-8: byte 13 cannot be read; save it in UTF-8.",
        ),
        (
            b"[" * 100_000,
            "DATA/x.json: the JSON is nested too deeply, or has a number that is too long; export the file again.",
        ),
        (
            [{"image_id": 1, "category_id": 1, "bbox": [], "score": 0.5}],
            "DATA/x.json: the file contains a list, not an object with images, annotations, categories; "
            "it looks like the output of a model; give the file of the true annotations.",
        ),
        (
            7,
            "DATA/x.json: the file contains a number, not an object with images, annotations, categories; "
            "export the file again.",
        ),
        (
            {"images": [], "annotations": {}},
            "DATA/x.json: 'annotations' is an object; it is a list in COCO's format of instances; "
            "export the file again.",
        ),
    ],
)
def test_a_file_that_is_no_file_of_instances_is_named(tmp_path: Path, content: Any, said: str) -> None:
    found, sentences = parsed(tmp_path, content)
    assert found is None
    assert sentences[0] == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("images", 0, "id", value=...), "image number 1: its id is missing; give each image a number as its id"),
        (put("images", 0, "id", value=[1]), "image number 1: its id is [1]; give each image a number as its id"),
        (put("images", 1, "id", value=10), "image 10: a.png and b.png both have this id; give each "
         "image its own id"),
        (put("images", 1, "file_name", value=...), "image 11: it has no 'file_name'; name its file, or remove it"),
        (put("images", 1, "file_name", value="a.png"), "image 11: its file a.png is the file of image 10 too; "
         "list each file once, with all of its annotations"),
        (put("images", 1, "file_name", value="../a.png"), "image 11: its file '../a.png' is not below the folder "
         "of images; name the file as seen from that folder"),
        (put("images", 1, "width", value="16"), 'image 11: its size is "16" x 12; write width and height in pixels'),
        (put("images", 1, value=3), "images, entry 2: it is a number, not an object; export the file again"),
        (put("annotations", 1, "id", value=100), "annotation 100: annotations number 1 and 2 both have this id; "
         "give each annotation its own id"),
        (put("annotations", 1, "id", value=...), "annotation number 2: its id is missing; "
         "give each annotation a number as its id"),
        (put("annotations", 1, "image_id", value=99), "annotation 101: its image 99 is not in the file; "
         "list the image, or remove the annotation"),
        (put("annotations", 1, "bbox", value=...), "annotation 101: it has no 'bbox', and needs four numbers; "
         "write [x, y, width, height]"),
        (put("annotations", 1, "bbox", value=[1, 2, "3", 4]), "annotation 101: its 'bbox' is [1, 2, \"3\", 4], and "
         "needs four numbers; write [x, y, width, height]"),
        (put("annotations", 1, "bbox", value=[1, 2, 10**400, 4]), None),
        (put("categories", 1, "id", value=7), "category 7: dog and cat both have this id; "
         "give each category its own id"),
        (put("categories", 1, "name", value="dog"), "category 3: another category is named 'dog' too; "
         "give each its own name"),
        (put("categories", 1, "name", value=" "), "category 3: it has no name; name it"),
        (put("categories", 1, "id", value="3"), 'category number 2: its id is "3"; give '
         "each category a number as its id"),
        (put("categories", value=[]), "there are no categories; list the classes in it"),
    ],
)  # fmt: skip
def test_an_entry_at_fault_is_named_by_its_id(tmp_path: Path, change: Change, said: str | None) -> None:
    content = instances("ab")
    change(content)
    _, sentences = parsed(tmp_path, content)
    if said is None:
        assert len(sentences) == 1
        assert sentences[0].startswith("DATA/x.json, annotation 101: its 'bbox' is [1, 2, 1000")
        assert len(sentences[0]) < 200
        return
    comma = ": " if said.startswith("there are") else ", "
    assert f"DATA/x.json{comma}{said}." in sentences
    more = [one for one in sentences if "annotation" not in one.split(":")[0]]
    assert len(more) <= 1  # nothing else is said, but of annotations whose image went


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            put("annotations", 1, "category_id", value=4),
            "DATA/train.json, annotation 101: its class 4 is unknown; known: 3, 7.",
        ),
        (
            put("annotations", 1, "category_id", value=...),
            "DATA/train.json, annotation 101: its class 'missing' is unknown; known: 3, 7.",
        ),
        (
            put("annotations", 1, "bbox", value=[2, 3, 0, 5]),
            "DATA/train.json, annotation 101: its box 2, 3, 0, 5 has no area; draw it again, or remove the object.",
        ),
        (
            put("annotations", 1, "bbox", value=[2, 3, float("nan"), 5]),
            "DATA/train.json, annotation 101: its box 2, 3, nan, 5 has a number that is not finite; "
            "draw it again, or remove the object.",
        ),
        (
            put("annotations", 1, "bbox", value=[16, 3, 4, 5]),
            "DATA/train.json, annotation 101: its box 16, 3, 4, 5 is outside the image of 16x12; "
            "correct it, or remove the object.",
        ),
        (
            put("annotations", 1, "bbox", value=[10, 3, 8, 5]),
            "DATA/train.json, annotation 101: its box 10, 3, 8, 5 extends 2 pixels beyond the image of 16x12; "
            "correct it, or skip errors to cut it off at the edge.",
        ),
        (
            put("images", 0, "width", value=20),
            "DATA/train.json, image 10: the stated size is 20 x 12 pixels, and the image is 16 x 12: 'images/a.png'; "
            "annotate the image as it is stored.",
        ),
        (
            put("images", 0, "file_name", value="e.png"),
            "DATA/images/e.png: the file does not exist; check its name, upper and lower case too.",
        ),
        (
            put("images", 0, "file_name", value="n" * 300),
            f"DATA/images/{'n' * 300}: the file cannot be read: File name too long; check its permissions.",
        ),
        (
            put("categories", 0, "name", value="hound"),
            "DATA/train.json: category 7 is 'hound', and 'dog' in another file; use the same ids in all files.",
        ),
    ],
)
def test_what_does_not_fit_the_images_is_named(tmp_path: Path, change: Change, said: str) -> None:
    _, sentences = looked(write_coco(tmp_path, change))
    assert sentences == [said]


def test_an_entry_that_is_no_object_costs_no_other_entry(tmp_path: Path) -> None:
    content = instances("ab")
    content["annotations"].insert(0, "a text")
    found, sentences = parsed(tmp_path, content)
    assert sentences == [
        "DATA/x.json, annotations, entry 1: it is a text, not an object; export the file again."
    ]
    assert (len(found.images), len(found.objects)) == (2, len(content["annotations"]) - 1)


def test_one_class_under_two_ids_is_named(tmp_path: Path) -> None:
    def renumber(content: dict[str, Any]) -> None:
        content["categories"][0]["id"] = content["annotations"][1]["category_id"] = 8

    _, said = looked(write_coco(tmp_path, renumber))
    assert said == [
        "DATA/test.json and DATA/train.json: the class 'dog' has another id in each; "
        "use the same ids in all files."
    ]


def test_a_byte_order_mark_and_missing_sizes_do_no_harm(tmp_path: Path) -> None:
    content = instances("ab")
    for image in content["images"]:
        del image["width"], image["height"]
    found, said = parsed(tmp_path, b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert said == []
    assert [image.size for image in found.images] == [None, None]


def test_which_file_is_meant_has_to_be_clear(tmp_path: Path) -> None:
    _, said = looked(tmp_path)
    hint = "name it with the setting annotations, below the folder of your data."
    assert said == [f"DATA: there is no JSON file; {hint}"]
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text("{}")
    _, said = looked(tmp_path)
    assert said == [f"DATA: it is not clear which file has the annotations: one.json, two.json; {hint}"]
    _, said = looked(tmp_path, annotations="three.json")
    assert said == [
        "DATA/three.json: the file cannot be read: No such file or directory; check its path and its permissions."
    ]
    with pytest.raises(ConfigError, match="there is no split 'trian'"):
        looked(tmp_path, annotations={"trian": "one.json"})


def test_what_is_skipped_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_coco(tmp_path, put("annotations", 0, "bbox", value=[2, 3, 0, 5]))
    (tmp_path / "images" / "c.png").write_bytes(b"")
    with pytest.raises(DataError) as stopped:
        coco_json(tmp_path, False, 0, path=str(tmp_path), size=16)
    assert "annotation 100: its box 2, 3, 0, 5 has no area" in str(stopped.value)
    assert "c.png: the file is empty" in str(stopped.value)
    data = coco_json(tmp_path, False, 0, path=str(tmp_path), size=(HEIGHT, WIDTH), on_error="skip")
    assert objects_of(data.train.targets, data.classes) == [OBJECTS["a"][1:], []]
    assert objects_of(data.test.targets, data.classes) == [OBJECTS["d"]]
    assert sum(note.startswith("skipped ") for note in data.notes) == 2


def test_the_split_of_a_file_goes_before_a_field_of_its_images(tmp_path: Path) -> None:
    def claim(content: dict[str, Any]) -> None:
        for image in content["images"]:
            image["split"] = "test"

    found, said = looked(write_coco(tmp_path, claim))
    assert (found.splits, said) == (["test", "test", "train", "train"], [])
    assert "split" not in found.columns


def folder_of(boxes: int, folder: Path) -> Path:
    """Four images that share the boxes equally."""
    content = instances("abcd")
    first = content["annotations"][0]
    content["annotations"] = [
        {**first, "id": at, "image_id": 10 + at % 4, "bbox": [at % 7, at % 3, 1 + at / boxes, 2]}
        for at in range(boxes)
    ]
    for name in "abcd":
        picture(folder / f"{name}.png", name)
    (folder / "all.json").write_text(json.dumps(content))
    return folder


def test_work_and_memory_of_the_check_grow_with_the_boxes_and_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (folder_of(boxes, tmp_path / str(boxes)) for boxes in (500, 4_500))
    calls = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    def work(folder: Path) -> int:
        nonlocal calls
        calls = 0
        sys.setprofile(called)
        try:
            found, said = looked(folder)
        finally:
            sys.setprofile(None)
        assert (said, found.facts()["boxes"]) == ([], int(folder.name))
        return calls

    def peak(folder: Path) -> int:
        tracemalloc.start()
        try:
            looked(folder)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    work(few)  # imports and compiles what is needed
    # A Python function for each box, or an object, is several times as much.
    assert work(many) - work(few) < 4 * 4_000
    monkeypatch.setattr("fedlens.data.formats.coco_annotations._WINDOW", 1 << 14)
    assert peak(many) - peak(few) < 300 * 4_000
