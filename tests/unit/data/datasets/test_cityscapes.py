from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets.cityscapes import IDS, cityscapes, training_ids
from tests.unit.data.datasets.voc_layout import write_image

NAMES = {
    "train": ["zurich_000000_000019", "aachen_000001_000019", "aachen_000000_000019"],
    "val": ["lindau_000000_000019"],
}


def write(root: Path, split: str, name: str, mask: np.ndarray) -> None:
    city = name.split("_")[0]
    folder = root / "cityscapes"
    height, width = mask.shape
    write_image(folder / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", width, height)
    labels = folder / "gtFine" / split / city
    labels.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mask).save(labels / f"{name}_gtFine_labelIds.png")
    # What stands beside it in the published archive.
    Image.fromarray(mask.astype(np.uint16) * 1000).save(labels / f"{name}_gtFine_instanceIds.png")
    write_image(labels / f"{name}_gtFine_color.png", width, height)
    (labels / f"{name}_gtFine_polygons.json").write_text("{}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, names in NAMES.items():
        for at, name in enumerate(names):
            write(tmp_path, split, name, (np.arange(128, dtype=np.uint8).reshape(8, 16) + 7 * at) % 34)
    # The published archive has the test split too, with masks that say nothing.
    write(tmp_path, "test", "berlin_000000_000019", np.zeros((8, 16), np.uint8))
    return tmp_path


def test_ids_are_those_that_torchvision_states() -> None:
    from torchvision.datasets import Cityscapes

    stated = {each.id: each.train_id for each in Cityscapes.classes if each.train_id not in (255, -1)}
    names = {each.train_id: each.name for each in Cityscapes.classes}
    assert {published: at for at, published in enumerate(IDS)} == stated
    assert list(CATALOGUE["cityscapes"].labels) == [names[at] for at in range(19)]
    ids = training_ids()
    assert {at: int(ids[at]) for at in range(256) if ids[at] != 255} == stated


def test_images_come_city_after_city_with_their_masks(root: Path) -> None:
    data = cityscapes(root, False, 0, size=(8, 16))
    assert (data.kind, data.input_shape, len(data.classes)) == ("segmentation", (3, 8, 16), 19)
    assert data.train.columns["city"].tolist() == ["aachen", "aachen", "zurich"]
    assert data.train.columns["client"].tolist() == ["aachen", "aachen", "zurich"]
    assert data.test.columns["client"].tolist() == ["lindau"]
    masks = data.train.targets.take(np.arange(3))
    for mask, shift in zip(masks, (14, 7, 0), strict=True):
        published = (np.arange(128).reshape(8, 16) + shift) % 34
        # By hand: road, sidewalk, building, rider, train, and what is none: unlabelled, parking, caravan.
        for id_, class_ in ((7, 0), (8, 1), (11, 2), (25, 12), (31, 16), (0, 255), (9, 255), (29, 255)):
            assert set(mask[published == id_].tolist()) == {class_}


def test_the_table_is_by_city(root: Path) -> None:
    write(root, "train", "bochum_000000_000019", np.full((8, 16), 26, np.uint8))
    write(root, "train", "bremen_000000_000019", np.full((8, 16), 3, np.uint8))
    table = cityscapes(root, False, 0, size=(8, 16)).table()
    assert table.column("city").tolist() == ["aachen", "aachen", "bochum", "bremen", "zurich"]
    assert table.marks[table.offsets[2] : table.offsets[3]].tolist() == [13]  # car
    assert table.offsets[4] == table.offsets[3]  # all void: no class at all


def test_an_image_without_mask_and_a_mask_without_image_are_listed(root: Path) -> None:
    (root / "cityscapes/gtFine/train/aachen/aachen_000001_000019_gtFine_labelIds.png").unlink()
    (root / "cityscapes/leftImg8bit/val/lindau/lindau_000000_000019_leftImg8bit.png").rename(
        root / "cityscapes/leftImg8bit/val/lindau/lindau_000000_000020_leftImg8bit.png"
    )
    with pytest.raises(DataError) as caught:
        cityscapes(root, False, 0)
    assert "there is no aachen_000001_000019_gtFine_labelIds.png in cityscapes/gtFine/train/aachen" in str(
        caught.value
    )
    (root / "cityscapes/leftImg8bit/train/aachen/aachen_000001_000019_leftImg8bit.png").unlink()
    with pytest.raises(DataError) as caught:
        cityscapes(root, False, 0)
    assert "2 problems in the data" in caught.value.what
    assert (
        "there is no lindau_000000_000019_leftImg8bit.png in cityscapes/leftImg8bit/val/lindau"
        in caught.value.what
    )
    assert (
        "there is no lindau_000000_000020_gtFine_labelIds.png in cityscapes/gtFine/val/lindau"
        in caught.value.what
    )


def test_what_is_there_in_part_is_noted_and_nothing_is_refused(root: Path, tmp_path: Path) -> None:
    assert cityscapes(root, False, 0).notes == (
        "3 of the 2,975 published images of train are there",
        "1 of the 500 published images of val are there",
    )
    with pytest.raises(DataError, match=r"register at cityscapes-dataset.com"):
        cityscapes(tmp_path / "elsewhere", True, 0)
    for path in (root / "cityscapes/leftImg8bit/val/lindau").iterdir():
        path.unlink()
    for path in (root / "cityscapes/gtFine/val/lindau").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"there are no images \*/\*_leftImg8bit\.png"):
        cityscapes(root, False, 0)
