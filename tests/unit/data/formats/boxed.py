"""The same few images with boxes, written as COCO's JSON, Pascal VOC's XML and YOLO's text files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset
from fedlens.data.diagnostics import Finding
from fedlens.data.formats.reader import examine
from fedlens.data.formats.scan import Fill, Scan
from tests.unit.data.pictures import pixels, write

WIDTH, HEIGHT = 16, 12
CLASSES = ("cat", "dog")
Marked = tuple[str, tuple[float, float, float, float]]

# By file name: (class, left, top, right, bottom), edges in pixels counted from 0.
OBJECTS: dict[str, list[Marked]] = {
    "a": [("cat", (0, 0, 16, 12)), ("dog", (2, 3, 10, 9))],
    "b": [],
    "c": [("dog", (5, 1, 8, 12))],
    "d": [("cat", (1, 2, 3, 5))],
}
SPLITS = {"train": ("a", "b"), "test": ("c", "d")}


def picture(path: Path, name: str) -> Path:
    return write(path, pixels(ord(name), HEIGHT, WIDTH))


def xml(name: str, objects: Sequence[Marked], size: tuple[object, object] = (WIDTH, HEIGHT)) -> str:
    """VOC's own layout and its way of counting."""
    lines = ["<annotation>", f"<filename>{name}.png</filename>"]
    lines.append(f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>")
    for label, (left, top, right, bottom) in objects:
        lines += ["<object>", f"<name>{label}</name>", "<difficult>0</difficult>"]
        sides = {"xmin": left + 1, "ymin": top + 1, "xmax": right, "ymax": bottom}
        lines += [f"<bndbox>{''.join(f'<{side}>{n}</{side}>' for side, n in sides.items())}</bndbox>"]
        lines += ["</object>"]
    return "\n".join([*lines, "</annotation>"]) + "\n"


def write_voc(folder: Path, objects: Mapping[str, Sequence[Marked]] = OBJECTS) -> Path:
    """`JPEGImages`, `Annotations`, and the lists of `SPLITS`."""
    for name, marked in objects.items():
        picture(folder / "JPEGImages" / f"{name}.png", name)
        (folder / "Annotations").mkdir(exist_ok=True)
        (folder / "Annotations" / f"{name}.xml").write_text(xml(name, marked))
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for split, names in SPLITS.items():
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    return folder


def write_yolo(folder: Path, objects: Mapping[str, Sequence[Marked]] = OBJECTS) -> Path:
    """`images/<split>`, `labels/<split>`, and classes.txt; an image without objects has no file of labels."""
    for split, names in SPLITS.items():
        for name in names:
            picture(folder / "images" / split / f"{name}.png", name)
            (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
            if objects[name]:
                lines = [yolo_line(label, box) for label, box in objects[name]]
                (folder / "labels" / split / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return folder


def yolo_line(label: str, box: Sequence[float], width: int = WIDTH, height: int = HEIGHT) -> str:
    left, top, right, bottom = box
    shares = (left + right) / 2 / width, (top + bottom) / 2 / height
    sizes = (right - left) / width, (bottom - top) / height
    return f"{CLASSES.index(label)} {' '.join(f'{share:.6f}' for share in (*shares, *sizes))}"


def instances(
    names: Sequence[str], objects: Mapping[str, Sequence[Marked]] = OBJECTS, **fields: Mapping[str, Any]
) -> dict[str, Any]:
    """One file of instances. The ids of images begin at 10, of annotations at 100; those of classes skip: 3, 7."""
    images = [
        {"id": 10 + at, "file_name": f"{name}.png", "width": WIDTH, "height": HEIGHT}
        | {field: values[name] for field, values in fields.items()}
        for at, name in enumerate(names)
    ]
    annotations: list[dict[str, Any]] = []
    for at, name in enumerate(names):
        for label, (left, top, right, bottom) in objects[name]:
            box = [left, top, right - left, bottom - top]
            category = {"cat": 3, "dog": 7}[label]
            ids = {"id": 100 + len(annotations), "image_id": 10 + at, "category_id": category}
            annotations.append({**ids, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
    categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat", "supercategory": "animal"}]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def write_coco(folder: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> Path:
    """`train.json` and `test.json`, and the images in `images`; `change` is let at the training file."""
    for split, names in SPLITS.items():
        for name in names:
            picture(folder / "images" / f"{name}.png", name)
        content = instances(names)
        if split == "train":
            change(content)
        (folder / f"{split}.json").write_text(json.dumps(content))
    return folder


def examined(fill: Fill, folder: Path, **settings: Any) -> tuple[Scan, list[str]]:
    """The scan, and what it found as sentences, in which the folder is called DATA."""
    given = {"path": str(folder), **settings}
    scan = examine(fill, given, full=False)
    return scan, told(scan.findings, folder)


def told(findings: Any, folder: Path) -> list[str]:
    return [str(finding).replace(f"{folder}", "DATA") for finding in findings if isinstance(finding, Finding)]


def objects_of(boxes: Boxes, classes: Sequence[str]) -> list[list[Marked]]:
    """The objects of each image, as `OBJECTS` has them."""
    return [
        [
            (classes[label], tuple(np.round(box, 3).tolist()))  # type: ignore[misc]
            for label, box in zip(boxes.labels_of(image), boxes.boxes_of(image), strict=True)
        ]
        for image in range(len(boxes))
    ]


def check_same(data: Dataset) -> None:
    """The dataset is what `OBJECTS` and `SPLITS` say, image by image; its size has to be that of the files."""
    assert data.kind == "detection"
    assert data.classes == CLASSES
    for split, part in (("train", data.train), ("test", data.test)):
        names = SPLITS[split]
        assert objects_of(part.targets, data.classes) == [OBJECTS[name] for name in names]
        for row, name in enumerate(names):
            stored = pixels(ord(name), HEIGHT, WIDTH).transpose(2, 0, 1)
            np.testing.assert_array_equal(part.inputs.take(np.array([row]))[0], stored)
