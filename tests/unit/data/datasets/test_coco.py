import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.coco import coco, read_published
from tests.unit.data.datasets.voc_layout import write_image

CATEGORIES = [(18, "dog", "animal"), (1, "person", "person"), (90, "toothbrush", "indoor")]
IMAGES = {"train": [(397133, 40, 20), (37777, 20, 40), (252219, 40, 20), (9, 40, 20)], "val": [(139, 40, 20)]}
# (image, category, [x, y, width, height], iscrowd); the order is not that of the images.
OBJECTS = {
    "train": [
        (37777, 18, [2.5, 4.0, 10.0, 20.0], 0),
        (397133, 90, [10.0, 5.0, 20.0, 10.0], 0),
        (397133, 1, [0.0, 0.0, 40.0, 20.0], 1),
        (37777, 1, [15.0, 30.0, 10.0, 5.5], 0),
        (252219, 1, [5.0, 5.0, 0.0, 3.0], 0),
        (397133, 18, [30.0, 1.0, 4.0, 2.0], 0),
    ],
    "val": [(139, 1, [1.0, 2.0, 3.0, 4.0], 0)],
}


def content(split: str) -> dict[str, Any]:
    """What stands in instances_<split>2017.json, with all of its fields."""
    return {
        "info": {"description": "COCO 2017 Dataset", "year": 2017},
        "licenses": [{"url": "http://creativecommons.org/licenses/by-nc-sa/2.0/", "id": 1, "name": "CC"}],
        "images": [
            {
                "license": 1,
                "file_name": f"{key:012d}.jpg",
                "coco_url": f"http://images.cocodataset.org/{split}2017/{key:012d}.jpg",
                "height": height,
                "width": width,
                "date_captured": "2013-11-14 11:18:45",
                "id": key,
            }
            for key, width, height in IMAGES[split]
        ],
        "annotations": [
            {
                "segmentation": {"counts": [3, 4], "size": [40, 20]}
                if crowd
                else [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]],
                "area": 3.5,
                "iscrowd": crowd,
                "image_id": image,
                "bbox": box,
                "category_id": category,
                "id": 1000 + at,
            }
            for at, (image, category, box, crowd) in enumerate(OBJECTS[split])
        ],
        "categories": [{"supercategory": group, "id": key, "name": name} for key, name, group in CATEGORIES],
    }


def write(root: Path, split: str, what: Any) -> Path:
    path = root / "coco" / "annotations" / f"instances_{split}2017.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(what))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, images in IMAGES.items():
        write(tmp_path, split, content(split))
        for key, width, height in images:
            write_image(tmp_path / "coco" / f"{split}2017" / f"{key:012d}.jpg", width, height, key % 100)
    return tmp_path


def test_category_ids_that_skip_become_classes_in_their_order(root: Path) -> None:
    data = coco(root, False, 0)
    assert (data.kind, data.input_shape) == ("detection", (3, 640, 640))
    assert data.classes == ("person", "dog", "toothbrush")
    assert data.train.columns["image"].tolist() == [397133, 37777, 252219, 9]
    assert data.train.targets.offsets.tolist() == [0, 2, 4, 4, 4]
    assert data.train.targets.labels.tolist() == [2, 1, 1, 0]
    assert data.test.targets.labels.tolist() == [0]


def test_boxes_are_edges_in_the_delivered_image(root: Path) -> None:
    boxes = coco(root, False, 0, size=40).train.targets
    # 40x20 lies in 40x40 with 10 rows above it; 20x40 with 10 columns left of it.
    assert boxes.boxes_of(0).tolist() == [[10, 15, 30, 25], [30, 11, 34, 13]]
    assert boxes.boxes_of(1).tolist() == [[12.5, 14 - 10, 22.5, 24], [25, 30, 30, 35.5]]
    doubled = coco(root, False, 0, size=(40, 80), fit="stretch").train.targets
    assert doubled.boxes_of(1).tolist() == [[10, 4, 50, 24], [60, 30, 80, 35.5]]


def test_what_is_left_out_is_counted(root: Path) -> None:
    assert coco(root, False, 0).notes == (
        "train, objects left out because their box has no area in the image: 1",
        "train, boxes left out because they are around a crowd: 1",
    )


def test_images_without_objects_stay_or_go(root: Path) -> None:
    whole, some = coco(root, False, 0), coco(root, False, 0, empty=False)
    assert len(whole.train) == 4
    assert some.train.columns["image"].tolist() == [397133, 37777]
    assert some.train.targets.offsets.tolist() == [0, 2, 4]
    assert some.train.inputs.files[1] == "coco/train2017/000000037777.jpg"
    assert some.notes[-1] == "train, images left out because they show no object: 2"
    # The test split keeps them: a detector can be wrong about them.
    empty_val = content("val") | {"annotations": []}
    write(root, "val", empty_val)
    assert len(coco(root, False, 0, empty=False).test) == 1


def test_the_table_counts_each_class_once_an_image(root: Path) -> None:
    table = coco(root, False, 0).table()
    assert (table.marks.tolist(), table.offsets.tolist()) == ([1, 2, 0, 1], [0, 2, 4, 4, 4])


def test_the_image_that_belongs_to_the_boxes_is_delivered(root: Path) -> None:
    data = coco(root, False, 0, size=(40, 20), fit="stretch")
    np.testing.assert_array_equal(
        data.train.inputs.take(np.array([1]))[0],
        write_image(root / "again.jpg", 20, 40, 37777 % 100).transpose(2, 0, 1),
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c: c["annotations"][3].update(image_id=5), "annotation 1003: its image 5 is not in the file"),
        (
            lambda c: c["annotations"][3].update(category_id=2),
            "annotation 1003: its class 2 is unknown (known: 1, 18, 90)",
        ),
        (lambda c: c["images"][1].update(id=9), "000000000009.jpg both have this id"),
        (
            lambda c: c["annotations"][0].pop("bbox"),
            "annotation 1000: it has no 'bbox', and needs four numbers",
        ),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "annotation 1000: its 'bbox' is [1, 2, 3]"),
        (
            lambda c: c["annotations"][0].update(bbox=[1, 2, float("nan"), 4]),
            "annotation 1000: its box 1, 2, nan, 4 has a number that is not finite",
        ),
        (lambda c: c["images"][0].update(height=0), "image 397133: it has no width or height"),
        (lambda c: c["images"].clear() or c["annotations"].clear(), "there are no images"),
        (lambda c: c.pop("categories"), "there is no 'categories'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(root: Path, change, what: str) -> None:
    changed = content("train")
    change(changed)
    path = write(root, "train", changed)
    with pytest.raises(DataError) as caught:
        coco(root, False, 0)
    error = caught.value
    assert what in (error.what if error.where is None else f"{error.where}: {error.what}")
    assert str(path) in str(error)
    assert str(error).endswith(
        "he file is corrupt or not the published one: remove it and download it again."
    )


def test_all_problems_of_a_file_are_reported_at_once(root: Path) -> None:
    changed = content("train")
    changed["annotations"][0].pop("bbox")
    changed["annotations"][3]["category_id"] = 2
    changed["images"][0]["height"] = 0
    write(root, "train", changed)
    with pytest.raises(DataError, match="3 problems in the data"):
        coco(root, False, 0)


def test_a_file_that_is_cut_off_is_refused(root: Path) -> None:
    path = root / "coco" / "annotations" / "instances_val2017.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"the file is not valid JSON: .*line 1, column"):
        read_published(path)
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="the file contains a list, not an object with images"):
        read_published(path)


def test_files_that_are_not_there(root: Path) -> None:
    write(root, "val", content("val") | {"categories": content("val")["categories"][:2]})
    with pytest.raises(DataError, match="different categories"):
        coco(root, False, 0)
    write(root, "val", content("val"))
    (root / "coco" / "train2017" / "000000000009.jpg").unlink()
    with pytest.raises(DataError, match="1 of the 4 images in the list are not below"):
        coco(root, False, 0)
    (root / "coco" / "annotations" / "instances_train2017.json").unlink()
    with pytest.raises(DataError, match=r"annotations_trainval2017.zip"):
        coco(root, True, 0)
