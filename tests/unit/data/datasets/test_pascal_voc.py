import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import dataset_files
from fedlens.data.datasets import pascal_voc as module
from fedlens.data.datasets.pascal_voc import pascal_voc
from fedlens.data.download import Resource
from tests.unit.data.datasets.voc_layout import Box, write_annotated, write_image, write_list

VOC, SBD = "VOCdevkit/VOC2012", "benchmark_RELEASE/dataset"
VOC_ARCHIVE, SBD_ARCHIVE = CATALOGUE["pascal-voc"].archives
LISTS = {"train": ["2007_000032", "2007_000039"], "val": ["2007_000033", "2007_000042"]}
# 2007_000039 is in VOC's train too, and 2007_000033 and 2007_000042 in its val.
SBD_LISTS = {"train": ["2008_000002", "2007_000033", "2008_000001"], "val": ["2007_000039", "2007_000042"]}
SIZE = (16, 24)


def mask_of(name: str, void: bool) -> np.ndarray:
    """uint8 [16, 24] of a name: half background, half one class, and a void border where VOC drew it."""
    mask = np.zeros(SIZE, np.uint8)
    mask[:, 12:] = 1 + int(name[-2:]) % 20
    if void:
        mask[:, 11] = 255
    return mask


def write_mat(path: Path, mask: np.ndarray) -> None:
    """As SBD has it: the 1x1 struct GTcls, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    boundaries = np.empty((20, 1), object)
    for at in range(20):
        boundaries[at, 0] = np.zeros(mask.shape, np.uint8)
    present = np.unique(mask[mask > 0]).reshape(-1, 1)
    fields = {"Boundaries": boundaries, "Segmentation": mask, "CategoriesPresent": present}
    savemat(path, {"GTcls": fields}, do_compression=True)


def write_voc_mask(path: Path, mask: np.ndarray) -> None:
    """A palette picture whose colours say nothing of the ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.frombytes("P", mask.shape[::-1], mask.tobytes())
    picture.putpalette([(37 * at + shift) % 256 for at in range(256) for shift in (128, 5, 77)])
    picture.save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, names in LISTS.items():
        write_list(tmp_path / VOC, "Segmentation", split, names)
        for name in names:
            write_image(tmp_path / VOC / "JPEGImages" / f"{name}.jpg", 24, 16, int(name[-2:]))
            write_voc_mask(tmp_path / VOC / "SegmentationClass" / f"{name}.png", mask_of(name, void=True))
    for split, names in SBD_LISTS.items():
        (tmp_path / SBD).mkdir(parents=True, exist_ok=True)
        (tmp_path / SBD / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            write_image(tmp_path / SBD / "img" / f"{name}.jpg", 24, 16, int(name[-2:]))
            write_mat(tmp_path / SBD / "cls" / f"{name}.mat", mask_of(name, void=False))
    return tmp_path


def masks_of(examples) -> np.ndarray:
    return examples.targets.take(np.arange(len(examples)))


def test_masks_are_the_positions_in_the_palette(root: Path) -> None:
    data = pascal_voc(root, False, 0, size=SIZE)
    assert (data.kind, data.input_shape) == ("segmentation", (3, 16, 24))
    assert (len(data.classes), data.classes[0], data.classes[1], data.classes[20]) == (
        21,
        "background",
        "aeroplane",
        "tvmonitor",
    )
    for examples, split in ((data.train, "train"), (data.test, "val")):
        assert examples.columns["image"].tolist() == LISTS[split]
        for mask, pixels, name in zip(
            masks_of(examples), examples.inputs.take(np.arange(2)), LISTS[split], strict=True
        ):
            np.testing.assert_array_equal(mask, mask_of(name, void=True))
            with Image.open(root / VOC / "JPEGImages" / f"{name}.jpg") as image:
                np.testing.assert_array_equal(pixels, np.asarray(image).transpose(2, 0, 1))
    assert data.notes == ()
    assert "Everingham" in data.source
    assert "SBD" not in data.source
    table = data.table()
    assert (table.marks.tolist(), table.offsets.tolist()) == ([0, 13, 0, 20], [0, 2, 4])


def test_augmented_adds_what_is_in_neither_split_of_voc(root: Path) -> None:
    data = pascal_voc(root, False, 0, augmented=True, size=SIZE)
    assert "SBD" in data.source
    assert data.train.columns["image"].tolist() == [*LISTS["train"], "2008_000001", "2008_000002"]
    masks = masks_of(data.train)
    # Where both have drawn a mask, VOC's counts: it alone has void.
    for mask, name, void in zip(
        masks, data.train.columns["image"].tolist(), (True, True, False, False), strict=True
    ):
        np.testing.assert_array_equal(mask, mask_of(name, void))
    assert data.test.columns["image"].tolist() == LISTS["val"]
    np.testing.assert_array_equal(masks_of(data.test)[0], mask_of("2007_000033", void=True))
    assert data.notes == (
        "train, images of SBD left out because they are in VOC's val, the test data: 2 of 5",
    )
    assert not set(data.train.columns["image"].tolist()) & set(data.test.columns["image"].tolist())


def test_the_split_of_sbd_alone_needs_no_voc(root: Path) -> None:
    (root / VOC / "ImageSets" / "Segmentation" / "val.txt").unlink()
    data = pascal_voc(root, False, 0, augmented=True, test="sbd", size=SIZE)
    assert data.train.columns["image"].tolist() == SBD_LISTS["train"]
    assert data.test.columns["image"].tolist() == SBD_LISTS["val"]
    for examples in (data.train, data.test):
        for mask, name in zip(masks_of(examples), examples.columns["image"].tolist(), strict=True):
            np.testing.assert_array_equal(mask, mask_of(name, void=False))
    assert data.table().marks.tolist() == [0, 3, 0, 14, 0, 2]


def test_masks_of_sbd_are_padded_with_void_and_keep_their_ids(root: Path) -> None:
    data = pascal_voc(root, False, 0, augmented=True, test="sbd", size=12)
    mask = masks_of(data.train)[0]
    assert (mask[:2] == 255).all()
    assert (mask[10:] == 255).all()
    np.testing.assert_array_equal(mask[2:10], mask_of("2008_000002", void=False)[::2, ::2])


def test_a_mask_that_is_none_of_sbds_is_refused(root: Path) -> None:
    path = root / SBD / "cls" / "2008_000002.mat"
    data = pascal_voc(root, False, 0, augmented=True, test="sbd", size=SIZE)
    for spoil, what in (
        (lambda: savemat(path, {"GTinst": {"Segmentation": np.zeros(SIZE, np.uint8)}}), "cannot be read"),
        (lambda: write_mat(path, np.zeros(SIZE, np.uint16)), "found uint16"),
        (lambda: path.write_bytes(path.read_bytes()[:90]), "cannot be read"),
        (lambda: path.write_bytes(b""), "cannot be read"),
    ):
        spoil()
        with pytest.raises(DataError, match=what) as caught:
            masks_of(data.train)
        assert caught.value.where == str(path)
        assert caught.value.hint == "unpack the archive of SBD again"


def test_files_that_are_not_there(root: Path) -> None:
    (root / SBD / "cls" / "2008_000001.mat").unlink()
    with pytest.raises(DataError, match=r"the first is benchmark_RELEASE/dataset/cls/2008_000001.mat"):
        pascal_voc(root, False, 0, augmented=True)
    assert len(pascal_voc(root, False, 0).train) == 2
    (root / SBD / "val.txt").unlink()
    with pytest.raises(DataError, match=r"is incomplete in .*: missing benchmark_RELEASE/dataset/val.txt"):
        pascal_voc(root, False, 0, augmented=True)
    (root / VOC / "ImageSets" / "Segmentation" / "train.txt").unlink()
    with pytest.raises(DataError, match=r"missing VOCdevkit/VOC2012/.*--download"):
        pascal_voc(root, False, 0)


BOXES: dict[str, tuple[list[Box], list[int]]] = {
    "2008_000001": ([("person", 1, 1, 12, 16), ("dog", 5, 5, 9, 9), ("person", 13, 1, 24, 16)], [1]),
    "2008_000002": ([("tvmonitor", 3, 3, 4, 4)], [0]),
    "2008_000003": ([("aeroplane", 2, 2, 24, 16)], []),
}


@pytest.fixture
def annotated(tmp_path: Path) -> Path:
    for name, (boxes, difficult) in BOXES.items():
        write_annotated(tmp_path / VOC, name, 24, 16, boxes, difficult)
    write_list(tmp_path / VOC, "Main", "train", ["2008_000001", "2008_000002"])
    write_list(tmp_path / VOC, "Main", "val", ["2008_000003"])
    return tmp_path


def test_difficult_objects_are_left_out_and_counted(annotated: Path) -> None:
    data = pascal_voc(annotated, False, 0, task="detection", size=SIZE)
    assert (data.kind, data.classes) == ("detection", CATALOGUE["pascal-voc"].labels[1:])
    assert data.train.targets.boxes.tolist() == [[0, 0, 12, 16], [12, 0, 24, 16]]
    assert data.train.targets.labels.tolist() == [14, 14]
    assert data.train.targets.offsets.tolist() == [0, 2, 2]
    assert data.test.targets.boxes.tolist() == [[1, 1, 24, 16]]
    assert data.notes == ("train, objects left out because they are marked as difficult: 2",)
    whole = pascal_voc(annotated, False, 0, task="detection", difficult=True, size=SIZE)
    assert whole.train.targets.labels.tolist() == [14, 11, 14, 19]
    assert whole.train.targets.boxes_of(1).tolist() == [[2, 2, 4, 4]]
    assert whole.notes == ()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"task": "detection", "augmented": True}, "augmented"),
        ({"test": "sbd"}, "test"),
        ({"difficult": True}, "difficult"),
        ({"size": 0}, "size"),
    ],
)
def test_settings_that_do_not_go_together(root: Path, settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pascal_voc(root, False, 0, **settings)  # type: ignore[arg-type]
    assert caught.value.where == key


def test_what_is_missing_is_fetched_and_unpacked(root: Path, tmp_path: Path, monkeypatch) -> None:
    """Both archives, from a folder instead of the network."""
    elsewhere = tmp_path / "elsewhere"
    fetched = []

    def fetch(resource: Resource, folder: Path) -> Path:
        inner = "VOCdevkit" if resource.md5 == VOC_ARCHIVE.md5 else "benchmark_RELEASE"
        folder.mkdir(exist_ok=True)
        with tarfile.open(folder / resource.name, "w") as tar:
            tar.add(root / inner, inner)
        fetched.append(resource.name)
        return folder / resource.name

    monkeypatch.setattr(dataset_files, "fetch", fetch)
    data = pascal_voc(elsewhere, True, 0, augmented=True, size=SIZE)
    assert (len(data.train), len(data.test)) == (4, 2)
    assert fetched == ["VOCtrainval_11-May-2012.tar", "benchmark.tgz"]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["VOCdevkit", "benchmark_RELEASE"]
    pascal_voc(elsewhere, True, 0, augmented=True)
    assert len(fetched) == 2


def test_the_archives_are_those_that_torchvision_fetches() -> None:
    from torchvision.datasets.sbd import SBDataset
    from torchvision.datasets.voc import DATASET_YEAR_DICT

    assert VOC_ARCHIVE.md5 == DATASET_YEAR_DICT["2012"]["md5"]
    assert VOC_ARCHIVE.urls[0].rpartition("/")[2] == DATASET_YEAR_DICT["2012"]["filename"]
    assert DATASET_YEAR_DICT["2012"]["base_dir"] == module.INNER
    assert (SBD_ARCHIVE.md5, SBD_ARCHIVE.urls[0]) == (SBDataset.md5, SBDataset.url)
