"""The readers of a user's own boxes against real ones: BCCD, which is published in Pascal VOC's layout."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset
from fedlens.data.diagnostics import Finding
from fedlens.data.formats.coco_json import coco_json
from fedlens.data.formats.folder_check import check_folder
from fedlens.data.formats.voc_xml import voc_xml
from fedlens.data.formats.yolo_txt import yolo_txt
from tests.contract.contract_kit import nightly_but

pytestmark = pytest.mark.real

ROOT = Path(os.environ.get("FEDLENS_DATA", ""))
SCALE = 4  # the photographs are 640 x 480; a quarter is quick, and exact in binary
SIZE = (480 // SCALE, 640 // SCALE)


@pytest.fixture(scope="module")
def bccd() -> Path:
    if "FEDLENS_DATA" not in os.environ:
        pytest.skip("FEDLENS_DATA is not set: it names the folder with the real data")
    if not (ROOT / "BCCD").is_dir():
        pytest.skip("no BCCD below FEDLENS_DATA")
    return ROOT / "BCCD"


@pytest.fixture(scope="module")
def read(bccd: Path) -> Dataset:
    """All of it; what is wrong is skipped."""
    return voc_xml(ROOT, False, 0, path=str(bccd), size=SIZE, train_list="trainval", on_error="skip")


def test_the_two_boxes_without_area_are_named_with_their_lines(bccd: Path) -> None:
    with pytest.raises(DataError) as stopped:
        voc_xml(ROOT, False, 0, path=str(bccd), size=SIZE)
    said = str(stopped.value)
    assert said.startswith("2 problems in the data")
    for name, box, line in ((338, "504, 337, 504, 337", 163), (343, "181, 329, 181, 329", 55)):
        assert f"BloodImage_00{name}.xml, line {line}: its box {box} has no area" in said
        # The line is that of the box.
        lines = (bccd / "Annotations" / f"BloodImage_00{name}.xml").read_text().splitlines()
        assert lines[line - 1].strip() == "<bndbox>"
        assert lines[line].strip() == f"<xmin>{box.split(',')[0]}</xmin>"


def test_check_decodes_all_of_it_and_finds_those_two(bccd: Path) -> None:
    check = check_folder(bccd, "voc-xml")
    assert [Path(finding.where.partition(",")[0]).name for finding in check.findings] == [
        "BloodImage_00338.xml",
        "BloodImage_00343.xml",
    ]
    assert all(isinstance(finding, Finding) and finding.example for finding in check.findings)
    assert (check.facts["images"], check.facts["boxes"]) == (364, 4886)
    # Of the published 4,155 red cells two have no area.
    assert check.facts["classes"] == {"Platelets": 361, "RBC": 4153, "WBC": 372}
    assert check.facts["splits"] == {"train": 205, "validation": 87, "test": 72}


def test_where_errors_are_skipped_the_rest_is_read(read: Dataset) -> None:
    assert (len(read.train), len(read.test)) == (292, 72)
    assert read.classes == ("Platelets", "RBC", "WBC")
    labels = np.concatenate([read.train.targets.labels, read.test.targets.labels])
    assert np.bincount(labels).tolist() == [361, 4153, 372]
    assert sum(note.startswith("skipped ") for note in read.notes) == 2
    # The first of trainval.txt, as it stands in its file: xmin 260, ymin 177, xmax 491, ymax 376, and so on.
    assert (SCALE * read.train.targets.boxes_of(0)[:2]).tolist() == [
        [259, 176, 491, 376],
        [77, 335, 184, 435],
    ]
    assert read.train.targets.labels_of(0)[:2].tolist() == [2, 1]


def rows(data: Dataset) -> dict[str, list[tuple[Any, ...]]]:
    """The objects of each image by its name, in pixels of the file."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for split in (data.train, data.test):
        boxes: Boxes = split.targets
        for image in range(len(split)):
            name = Path(split.inputs.files[image]).stem
            pairs = zip(boxes.labels_of(image), (SCALE * boxes.boxes_of(image)).tolist(), strict=True)
            found[name] = [(data.classes[label], *box) for label, box in pairs]
    return found


def test_the_same_boxes_as_coco_json(bccd: Path, read: Dataset, tmp_path: Path) -> None:
    shutil.copytree(bccd / "JPEGImages", tmp_path / "JPEGImages")
    ids = {"RBC": 1, "WBC": 5, "Platelets": 9}
    objects = rows(read)
    for split, part in (("train", read.train), ("test", read.test)):
        content: dict[str, list[dict[str, Any]]] = defaultdict(list)
        content["categories"] = [{"id": key, "name": name} for name, key in ids.items()]
        for image in range(len(part)):
            file = Path(part.inputs.files[image]).name
            content["images"].append({"id": image, "file_name": file, "width": 640, "height": 480})
            for name, left, top, right, bottom in objects[Path(file).stem]:
                content["annotations"].append(
                    {
                        "id": len(content["annotations"]),
                        "image_id": image,
                        "category_id": ids[name],
                        "bbox": [left, top, right - left, bottom - top],
                        "iscrowd": 0,
                    }
                )
        (tmp_path / f"{split}.json").write_text(json.dumps(content))
    again = coco_json(ROOT, False, 0, path=str(tmp_path), size=SIZE, images="JPEGImages")
    assert again.classes == ("RBC", "WBC", "Platelets")
    assert (len(again.train), len(again.test)) == (292, 72)
    assert rows(again) == rows(read)
    assert read.mean == again.mean


def test_the_same_boxes_as_yolo_txt(bccd: Path, read: Dataset, tmp_path: Path) -> None:
    objects = rows(read)
    for split, part in (("train", read.train), ("test", read.test)):
        for kind in ("images", "labels"):
            (tmp_path / kind / split).mkdir(parents=True)
        for image in range(len(part)):
            file = bccd / part.inputs.files[image]
            shutil.copy(file, tmp_path / "images" / split / file.name)
            lines = [
                f"{read.classes.index(name)} {(left + right) / 1280:.6f} {(top + bottom) / 960:.6f} "
                f"{(right - left) / 640:.6f} {(bottom - top) / 480:.6f}\n"
                for name, left, top, right, bottom in objects[file.stem]
            ]
            (tmp_path / "labels" / split / f"{file.stem}.txt").write_text("".join(lines))
    (tmp_path / "data.yaml").write_text(f"names: {list(read.classes)}\n")
    again = yolo_txt(ROOT, False, 0, path=str(tmp_path), size=SIZE)
    assert again.classes == read.classes
    ours = rows(again)
    assert ours.keys() == objects.keys()
    for name, theirs in objects.items():
        assert [label for label, *_ in ours[name]] == [label for label, *_ in theirs]
        found = np.array([box for _, *box in ours[name]]).reshape(-1, 4)
        # Six digits of a share of 640 pixels.
        np.testing.assert_allclose(found, np.array([box for _, *box in theirs]).reshape(-1, 4), atol=1e-3)


@pytest.mark.parametrize("fit", nightly_but({"crop"}, ["pad", "crop", "stretch"]))
def test_boxes_stand_where_the_pixels_do(bccd: Path, fit: str) -> None:
    # White cells are stained dark blue: what their boxes hold has less red than the whole, wherever they land.
    settings: dict[str, Any] = {"path": str(bccd), "size": (192, 160), "fit": fit, "on_error": "skip"}
    data = voc_xml(ROOT, False, 0, **settings)
    darker, seen = 0, 0
    for image in range(40):
        pixels = data.train.inputs.take(np.array([image]))[0][0].astype(float)
        pairs = zip(data.train.targets.labels_of(image), data.train.targets.boxes_of(image), strict=True)
        for label, box in pairs:
            left, top, right, bottom = np.round(box).astype(int)
            if label == data.classes.index("WBC") and right - left > 8 and bottom - top > 8:
                seen += 1
                darker += pixels[top:bottom, left:right].mean() < pixels[pixels > 0].mean()
    assert seen > 20
    assert darker > 0.95 * seen


def test_the_image_is_that_of_the_file(bccd: Path, read: Dataset) -> None:
    with Image.open(bccd / read.train.inputs.files[0]) as image:
        expected = np.asarray(image).transpose(2, 0, 1)
    whole = replace(read.train.inputs, height=480, width=640)
    np.testing.assert_array_equal(whole.take(np.array([0]))[0], expected)
