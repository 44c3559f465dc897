"""CamVid and BCCD as they are published, against counts made with PIL and the standard library alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from fedlens.data.dataset import Dataset
from fedlens.data.datasets.bccd import bccd
from fedlens.data.datasets.camvid import camvid
from fedlens.data.loading import loaded

pytestmark = pytest.mark.real


def below(root: Path, name: str) -> Path:
    if not (root / name).is_dir():
        pytest.skip(f"no {name} below FEDLENS_DATA")
    return root / name


@pytest.fixture(scope="module")
def road(real_data: Path) -> Dataset:
    below(real_data, "CamVid")
    return camvid(real_data, False, 0)


@pytest.fixture(scope="module")
def blood(real_data: Path) -> Dataset:
    below(real_data, "BCCD")
    return bccd(real_data, False, 0)


def test_camvid_has_its_frames_and_drives(real_data: Path, road: Dataset) -> None:
    assert (len(road.train), len(road.test), len(road.classes)) == (367 + 101, 233, 11)
    assert road.notes == ()
    assert Counter(road.train.columns["client"].tolist()) == {
        "0001TP": 62,
        "0006R0": 101,
        "0016E5": 204 + 101,
    }
    assert Counter(road.test.columns["client"].tolist()) == {"0001TP": 62, "Seq05VD": 171}
    alone = camvid(real_data, False, 0, val="leave")
    assert Counter(alone.train.columns["client"].tolist()) == {"0001TP": 62, "0006R0": 101, "0016E5": 204}
    assert not {road.train.inputs.files[at] for at in range(468)} & {
        road.test.inputs.files[at] for at in range(233)
    }


def test_camvid_masks_are_the_published_ids(real_data: Path, road: Dataset) -> None:
    data = loaded(road, 2**30)
    for examples, at, path in (
        (data.train, 0, "trainannot/0001TP_006690.png"),
        (data.train, 367, "valannot/0016E5_07959.png"),
        (data.test, 232, "testannot/Seq05VD_f05100.png"),
    ):
        with Image.open(real_data / "CamVid" / path) as image:
            published = np.asarray(image)
        np.testing.assert_array_equal(examples.targets[at], np.where(published == 11, 255, published))
        with Image.open(real_data / "CamVid" / path.replace("annot", "")) as image:
            np.testing.assert_array_equal(examples.inputs[at], np.asarray(image).transpose(2, 0, 1))
    assert np.unique(data.train.targets).tolist() == [*range(11), 255]


def test_camvid_classes_are_where_they_should_be(road: Dataset) -> None:
    """Names in the right order: the sky is above and bright, the road below, cars between."""
    data = loaded(road, 2**30)
    rows = np.arange(data.train.targets.shape[1])[None, :, None]
    height = {
        name: float((rows * (data.train.targets == at)).sum() / (data.train.targets == at).sum())
        for at, name in enumerate(data.classes)
    }
    assert sorted(height, key=lambda name: height[name])[0] == "sky"
    assert sorted(height, key=lambda name: height[name])[-1] == "road"
    assert height["building"] < height["car"] < height["road"]
    assert height["tree"] < height["pavement"]
    grey = data.train.inputs.mean(axis=1)
    bright = [float(grey[data.train.targets == at].mean()) for at in range(11)]
    assert max(range(11), key=lambda at: bright[at]) == data.classes.index("sky")


def test_camvid_table_by_a_count_of_its_own(real_data: Path, road: Dataset) -> None:
    table = road.table()
    shown: Counter[int] = Counter()
    by_drive: Counter[str] = Counter()
    for split in ("train", "val"):
        for path in (real_data / "CamVid" / f"{split}annot").iterdir():
            with Image.open(path) as image:
                counts = image.histogram()
            here = [at for at in range(11) if counts[at]]
            shown.update(here)
            by_drive[path.name.split("_")[0]] += len(here)
    assert np.bincount(table.marks, minlength=11).tolist() == [shown[at] for at in range(11)]
    rows = table.column("client")[table.rows]
    assert {drive: int((rows == drive).sum()) for drive in by_drive} == by_drive


def annotations(folder: Path, split: str) -> Iterator[tuple[str, ElementTree.Element]]:
    for name in (folder / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
        yield name, ElementTree.parse(folder / "Annotations" / f"{name}.xml").getroot()


def test_bccd_has_its_images_and_boxes(real_data: Path, blood: Dataset) -> None:
    assert (len(blood.train), len(blood.test), blood.classes) == (205 + 87, 72, ("RBC", "WBC", "Platelets"))
    assert len(bccd(real_data, False, 0, val="leave").train) == 205
    published: Counter[str] = Counter()
    for split in ("train", "val", "test"):
        for _, root in annotations(real_data / "BCCD", split):
            published.update(each.findtext("name") or "" for each in root.iter("object"))
    assert published == {"RBC": 4155, "WBC": 372, "Platelets": 361}
    kept = np.bincount(np.concatenate([blood.train.targets.labels, blood.test.targets.labels]))
    # Two boxes of red blood cells have no width and no height.
    assert kept.tolist() == [4155 - 2, 372, 361]
    assert blood.notes == ("train, objects left out because the corners of their box coincide: 2",)


def test_bccd_boxes_are_the_published_ones(real_data: Path, blood: Dataset) -> None:
    names = blood.test.columns["image"].tolist()
    for at, (name, root) in enumerate(annotations(real_data / "BCCD", "test")):
        assert names[at] == name
        with Image.open(real_data / "BCCD" / "JPEGImages" / f"{name}.jpg") as image:
            assert image.size == (640, 480)
        published = [
            [float(each.findtext(f"bndbox/{edge}") or "") for edge in ("xmin", "ymin", "xmax", "ymax")]
            for each in root.iter("object")
        ]
        edges = np.array(published, np.float32) - [1, 1, 0, 0]
        np.testing.assert_array_equal(blood.test.targets.boxes_of(at), edges)
    everything = np.concatenate([blood.train.targets.boxes, blood.test.targets.boxes])
    assert (everything.min(), everything[:, 2].max() <= 640, everything[:, 3].max() <= 480) == (0, True, True)


def test_bccd_table_by_a_count_of_its_own(real_data: Path, blood: Dataset) -> None:
    table = blood.table()
    shown: Counter[str] = Counter()
    for split in ("train", "val"):
        for _, root in annotations(real_data / "BCCD", split):
            shown.update({each.findtext("name") or "" for each in root.iter("object")})
    marks = np.bincount(table.marks, minlength=3)
    assert {name: int(marks[at]) for at, name in enumerate(table.classes)} == shown
    assert (len(table), table.single) == (292, False)


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
def test_bccd_white_cells_stay_in_their_boxes(real_data: Path, fit: str) -> None:
    """White blood cells are stained violet: what is in their boxes has less green than the rest, at any size."""
    below(real_data, "BCCD")
    data = bccd(real_data, False, 0, size=(200, 160), fit=fit)  # type: ignore[arg-type]
    images = data.test.inputs.take(np.arange(len(data.test))).astype(np.int64)
    inside, outside = [], []
    for at, image in enumerate(images):
        violet = image[0] + image[2] - 2 * image[1]
        shown = np.zeros(violet.shape, bool)
        for label, (left, top, right, bottom) in zip(
            data.test.targets.labels_of(at), data.test.targets.boxes_of(at), strict=True
        ):
            if label == 1:
                shown[int(top) : int(bottom), int(left) : int(right)] = True
        around = ~shown & (image.sum(axis=0) > 0)
        if shown.any():
            inside.append(violet[shown].mean())
            outside.append(violet[around].mean())
    assert len(inside) > 50
    assert np.mean(np.array(inside) > np.array(outside) + 20) > 0.97
