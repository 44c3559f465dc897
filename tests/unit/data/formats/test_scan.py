from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.boxes import Boxes, placed
from fedlens.data.formats.data_checks import check_names
from fedlens.data.formats.reader import assemble
from fedlens.data.formats.scan import Scan
from tests.unit.data.pictures import pixels, write

SETTINGS: dict[str, Any] = {"size": (10, 20), "fit": "pad", "channels": 3, "test": 0.5, "on_error": "stop"}


def with_boxes(root: Path, settings: dict[str, Any] | None = None, **more: Any) -> Scan:
    """Three images of 40 x 40, 40 x 10 and 8 x 4 pixels, with two boxes, none and one."""
    sizes = [(40, 40), (40, 10), (8, 4)]
    names = [f"{at}.png" for at in range(3)]
    for at, (width, height) in enumerate(sizes):
        write(root / names[at], pixels(at, height, width))
    boxes = np.array([[4, 8, 20, 40], [0, 0, 40, 40], [0, 0, 8, 4]], np.float32)
    return Scan(
        root,
        SETTINGS | (settings or {}),
        format="coco-json",
        names=names,
        classes=("a", "b"),
        boxes=Boxes(boxes, np.array([1, 0, 1]), np.array([0, 2, 2, 3])),
        sizes=list(sizes),
        columns={"client": np.array(["x", "y", "z"])},
        splits=["train", "train", "test"],
        **more,
    )


def test_boxes_go_where_their_pixels_go(tmp_path: Path) -> None:
    found = assemble(with_boxes(tmp_path), 0)
    assert found.kind == "detection"
    # 40 x 40 becomes 10 x 10 in the middle of 20 x 10: a quarter, and 5 to the right.
    assert found.train.targets.boxes.tolist() == [[6, 2, 10, 10], [5, 0, 15, 10]]
    assert found.train.targets.labels.tolist() == [1, 0]
    assert found.train.targets.offsets.tolist() == [0, 2, 2]
    # 8 x 4 becomes 20 x 10.
    assert found.test.targets.boxes.tolist() == [[0, 0, 20, 10]]
    assert found.train.columns["client"].tolist() == ["x", "y"]
    assert found.notes == ()


def test_boxes_are_cut_at_the_edge_and_dropped_beyond_it(tmp_path: Path) -> None:
    found = assemble(with_boxes(tmp_path, {"fit": "crop", "size": (10, 40)}), 0)
    # 40 x 40 stays as large, of which the rows 15 to 25 are kept.
    assert found.train.targets.boxes.tolist() == [[4, 0, 20, 10], [0, 0, 40, 10]]
    scan = with_boxes(tmp_path)
    assert scan.boxes is not None
    scan.boxes.boxes[0] = 4, 0, 20, 15
    scan.settings = SETTINGS | {"fit": "crop", "size": (10, 40)}
    found = assemble(scan, 0)
    assert found.train.targets.boxes.tolist() == [[0, 0, 40, 10]]
    assert found.train.targets.labels.tolist() == [0]
    assert found.notes == ("train, objects left out because the crop cuts their centre off: 1",)


def test_a_sliver_at_the_edge_of_the_crop_is_no_object_as_in_published_sets(tmp_path: Path) -> None:
    scan = with_boxes(tmp_path)
    # Of 40 x 40 the rows 15 to 25 are kept; 6 of this box's 22 rows, and not its centre.
    sliver, whole = [4, 0, 20, 21], [0, 0, 40, 40]
    above, within = [0, 0, 8, 1], [0, 1, 8, 3]  # 8 x 4 becomes 40 x 20, rows 5 to 15
    boxes = np.array([sliver, whole, above, within], np.float32)
    scan.boxes = Boxes(boxes, np.array([1, 0, 1, 0]), np.array([0, 2, 2, 4]))
    scan.settings = SETTINGS | {"fit": "crop", "size": (10, 40)}
    found = assemble(scan, 0)
    assert found.train.targets.boxes.tolist() == [[0, 0, 40, 10]]
    assert found.test.targets.boxes.tolist() == [[0, 0, 40, 10]]
    assert (found.train.targets.labels.tolist(), found.test.targets.labels.tolist()) == ([0], [0])
    assert found.train.targets.offsets.tolist() == [0, 1, 1]
    assert found.notes == (
        "train, objects left out because the crop cuts their centre off: 1",
        "test, objects left out because the crop cuts their centre off: 1",
    )
    published = placed(scan.boxes.take(np.array([0])), np.array([[40, 40]]), 10, 40, "crop")
    np.testing.assert_array_equal(published.boxes.boxes, found.train.targets.boxes)


def test_rows_at_fault_are_left_out_and_counted(tmp_path: Path) -> None:
    scan = with_boxes(tmp_path, bad={1}, notes=["read"])
    assert scan.sizes is not None
    scan.sizes[1] = None
    check_names("client", {"St. Anna": 40, "St Anna": 2}, "scans", scan.findings)
    found = assemble(scan, 0, notes=["skipped"])
    assert len(found.train) == 1
    count, alike, *others, few = found.notes
    assert (count, others) == ("left out 1 of 3 images", ["skipped", "read"])
    assert alike.startswith("scans: the client 'St Anna' (2 images) looks like 'St. Anna' (40 images);")
    assert "fewer than 5 images" in few
    scan.bad.add(2)
    with pytest.raises(DataError, match="no example is left to test with"):
        assemble(scan, 0)


def test_facts_count_what_is_left(tmp_path: Path) -> None:
    facts = with_boxes(tmp_path, bad={2}).facts()
    assert facts == {
        "format": "coco-json",
        "images": 2,
        "left_out": 1,
        "boxes": 2,
        "classes": {"a": 1, "b": 1},
        "splits": {"train": 2},
        "clients": {"x": 1, "y": 1},
        "columns": [],
        "notes": [],
    }
