import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.dataset import Dataset
from fedlens.data.formats.folder_check import check_folder
from fedlens.data.formats.mask_folder import fill, mask_folder
from fedlens.data.formats.reader import examine
from fedlens.data.formats.scan import Scan
from tests.unit.data.pictures import pixels, write

CLASSES = ["road", "sky", "car"]


def ids(seed: int) -> np.ndarray:
    """A mask of 8 x 8 with the ids 0 to 2."""
    return pixels(seed, channels=1) % 3


def pairs(root: Path, *names: str, suffix: str = "", ending: str = ".png") -> None:
    for at, name in enumerate(names):
        write(root / f"images/{name}.jpg", pixels(at), quality=95)
        write(root / f"masks/{name}{suffix}{ending}", ids(at))


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return read_settings(
        mask_folder, {"path": str(root), "classes": CLASSES, "size": 8, **more}, "data.dataset"
    )


def dataset(root: Path, **more: Any) -> Dataset:
    return mask_folder(Path("unused"), False, 0, **settings(root, **more))


def check(root: Path, **more: Any) -> tuple[Scan, list[str]]:
    found = examine(fill, settings(root, **more), full=True)
    return found, [f"{f.where.removeprefix(f'{root}').lstrip('/')}: {f.what}" for f in found.findings]


@pytest.mark.parametrize("suffix", ["", "_mask"])
def test_images_and_masks_are_matched_by_name(tmp_path: Path, suffix: str) -> None:
    pairs(tmp_path, *"abcde", suffix=suffix)
    found = dataset(tmp_path, suffix=suffix, test=0.4)
    assert (found.name, found.kind, found.classes) == ("mask-folder", "segmentation", ("road", "sky", "car"))
    assert (len(found.train), len(found.test)) == (3, 2)
    for split in (found.train, found.test):
        for at in range(len(split)):
            name = split.inputs.files[at]
            assert split.targets.files[at] == f"masks/{name[7]}{suffix}.png"
            np.testing.assert_array_equal(split.targets.decode(at), ids("abcde".index(name[7])))
    table = found.table()
    assert table.offsets.tolist() == [0, 3, 6, 9]  # each shows all three classes


def test_void_becomes_255(tmp_path: Path) -> None:
    pairs(tmp_path, "a", "b")
    mask = ids(0)
    mask[0, :3] = 99
    write(tmp_path / "masks/a.png", mask)
    found = dataset(tmp_path, void=99, test=0.5)
    both = {split.inputs.files[0][7]: split.targets.decode(0) for split in (found.train, found.test)}
    expected = mask.copy()
    expected[0, :3] = 255
    np.testing.assert_array_equal(both["a"], expected)
    np.testing.assert_array_equal(both["b"], ids(1))


def test_masks_may_number_the_classes_otherwise(tmp_path: Path) -> None:
    pairs(tmp_path, "a", "b")
    for name in "ab":
        write(tmp_path / f"masks/{name}.png", np.array([[0, 1, 2, 3]] * 8, np.uint8).repeat(2, axis=1))
    found = dataset(tmp_path, void=0, ids=[1, 2, 3], test=0.5)
    row = [255, 255, 0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(found.train.targets.decode(0), [row] * 8)
    assert found.table().marks.tolist() == [0, 1, 2]
    found = dataset(tmp_path, void=2, ids=[3, 0, 1], test=0.5)
    np.testing.assert_array_equal(found.train.targets.decode(0), [[1, 1, 2, 2, 255, 255, 0, 0]] * 8)
    _, told = check(tmp_path, void=0, ids=[1, 3, 200])
    assert (
        told[0]
        == "masks/a.png: the mask has ids that are neither a class (1, 3, 200) nor void (0): 2 in 16 pixels"
    )
    _, told = check(tmp_path, void=0, ids=[1, 2, 3], classes=["x", "y", "z"])
    assert told == []
    assert check(tmp_path, ids=[1, 2, 3])[1][0] == (
        "masks/a.png: the mask has ids that are neither a class (1 .. 3) nor void (255): 0 in 16 pixels"
    )


@pytest.mark.parametrize("void", [0, 1, 2])
def test_the_hint_on_void_names_ids_that_help(tmp_path: Path, void: int) -> None:
    pairs(tmp_path, "a", "b")
    for name in "ab":
        write(tmp_path / f"masks/{name}.png", pixels(ord(name), channels=1) % 4)
    with pytest.raises(ConfigError, match="is both void and the class") as caught:
        check(tmp_path, void=void)
    assert caught.value.hint is not None
    given = tomllib.loads(caught.value.hint.rpartition("data.dataset.")[2])["ids"]
    found, told = check(tmp_path, void=void, ids=given)
    assert told == []
    assert found.ids is not None
    assert [found.ids[at] for at in range(4) if at != void] == [0, 1, 2]
    assert found.ids[void] == 255


@pytest.mark.parametrize(
    ("more", "where", "what"),
    [
        ({"ids": [1, 2]}, "ids", "there are 3 classes and 2 ids"),
        ({"ids": [1, 2, 1]}, "ids", "the id 1 is 'road' and 'car'"),
        ({"ids": [1, 2, 255]}, "void", "the id 255 is both void and the class 'car'"),
        ({"ids": [1, 2, 256]}, "data.dataset.ids", "number 3 in it must be at most 255"),
    ],
)
def test_ids_that_say_two_things(tmp_path: Path, more: dict, where: str, what: str) -> None:
    pairs(tmp_path, "a", "b")
    with pytest.raises(ConfigError, match=what) as caught:
        check(tmp_path, **more)
    assert caught.value.where == where


def test_folders_of_splits_and_clients(tmp_path: Path) -> None:
    pairs(tmp_path, "train/ulm/a", "train/jena/b", "test/ulm/c", "test/jena/d")
    found = dataset(tmp_path, client_level=1)
    assert [found.train.inputs.files[at] for at in range(2)] == [
        "images/train/jena/b.jpg",
        "images/train/ulm/a.jpg",
    ]
    assert found.train.columns["client"].tolist() == ["jena", "ulm"]
    assert found.test.targets.files[1] == "masks/test/ulm/c.png"


def test_a_table_says_client_and_split(tmp_path: Path) -> None:
    pairs(tmp_path, *"abc")
    lines = [
        "path,client,split",
        *(f"images/{n}.jpg,{w},{s}" for n, w, s in (("a", 1, "train"), ("b", 2, "test"), ("c", 2, "train"))),
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found = dataset(tmp_path, table="t.csv")
    assert found.train.columns["client"].tolist() == ["1", "2"]
    assert len(found.test) == 1


def test_an_unknown_id_in_most_masks_is_likely_void(tmp_path: Path) -> None:
    pairs(tmp_path, *"abc")
    for name in "ab":
        mask = ids(0)
        mask[0, :3] = 11
        write(tmp_path / f"masks/{name}.png", mask)
    found = check_folder(tmp_path, "mask-folder", {"classes": ["x", "y", "z"]}).findings
    assert [str(each.hint) for each in found] == [
        "most masks have 11: set data.dataset.void = 11 if it means no class, or name its class"
    ] * 2
    mask[0, :3] = 255
    write(tmp_path / "masks/b.png", mask)
    (alone,) = check_folder(tmp_path, "mask-folder", {"classes": ["x", "y", "z"]}).findings
    assert alone.hint == "check data.dataset.classes, ids and void, or write the mask again"


def test_everything_that_does_not_match_is_told(tmp_path: Path) -> None:
    pairs(tmp_path, *"abcdefg")
    (tmp_path / "masks/a.png").unlink()
    (tmp_path / "images/b.jpg").unlink()
    write(tmp_path / "masks/c.tif", ids(2))
    write(tmp_path / "images/d.png", 9)
    write(tmp_path / "masks/e.png", pixels(0, channels=1)[:4] % 3)
    wrong = ids(5)
    wrong[0, :2], wrong[3] = 17, 200
    write(tmp_path / "masks/f.png", wrong)
    write(tmp_path / "masks/g.png", pixels(3))
    (tmp_path / "masks/palette.txt").write_text("0 road")
    found, told = check(tmp_path)
    assert told == [
        "masks/palette.txt: the file name has no ending of an image",
        "masks/c.tif: the mask belongs to the same image as 'c.png'",
        "images/a.jpg: the image has no mask 'masks/a.png'",
        "images/d.png: another image has the same name apart from the ending",
        "masks/b.png: the mask has no image 'images/b.*'",
        "masks/g.png: the mask is in colour (RGB), and needs one class id per pixel",
        "masks/f.png: the mask has ids that are neither a class (0 .. 2) nor void (255): "
        "17 in 2 pixels, 200 in 8 pixels",
        "masks/e.png: the mask is 8x4, and its image 8x8 pixels",
    ]
    assert [found.names[row][7] for row in found.rows()] == ["c", "d"]
    with pytest.raises(DataError, match="8 problems in the data"):
        dataset(tmp_path)
    skipping = dataset(tmp_path, on_error="skip", test=0.5)
    assert len(skipping.train) == len(skipping.test) == 1
    assert "left out 5 of 7 images" in skipping.notes


def test_a_name_without_the_suffix_is_told(tmp_path: Path) -> None:
    pairs(tmp_path, *"abc", suffix="_m")
    write(tmp_path / "masks/d.png", ids(0))
    assert check(tmp_path, suffix="_m")[1] == ["masks/d.png: the name of the mask does not end in '_m'"]


def test_a_turned_photograph_is_told_from_a_wrong_size(tmp_path: Path) -> None:
    pairs(tmp_path, "a", "b", "c")
    exif = Image.Exif()
    exif[0x0112] = 6
    write(tmp_path / "images/a.jpg", pixels(0, 4, 8), exif=exif)
    write(tmp_path / "masks/a.png", np.zeros((8, 4), np.uint8))
    findings = examine(fill, settings(tmp_path), full=False).findings
    (finding,) = findings
    assert finding.what == "the mask is 4x8, and its image 8x4 pixels"
    assert "save it turned" in str(finding.hint)


def test_deep_masks(tmp_path: Path) -> None:
    pairs(tmp_path, "a", "b")
    write(tmp_path / "masks/a.png", ids(0).astype(np.uint16))
    assert check(tmp_path)[1] == []
    write(tmp_path / "masks/a.png", np.full((8, 8), 300, np.uint16))
    assert check(tmp_path)[1] == ["masks/a.png: the mask has the id 300, and ids go from 0 to 255"]


def test_wrong_ids_are_found_without_a_full_check(tmp_path: Path) -> None:
    pairs(tmp_path, "a", "b")
    write(tmp_path / "masks/a.png", np.full((8, 8), 3, np.uint8))
    with pytest.raises(DataError, match="3 in 64 pixels"):
        dataset(tmp_path)


def test_a_leak_is_found(tmp_path: Path) -> None:
    pairs(tmp_path, "train/a", "test/b")
    (tmp_path / "images/test/b.jpg").write_bytes((tmp_path / "images/train/a.jpg").read_bytes())
    assert ["1 image is in more than one split" in one for one in check(tmp_path)[1]] == [True]


def test_folders_and_settings_that_are_wrong(tmp_path: Path) -> None:
    pairs(tmp_path, "a", "b")
    assert check(tmp_path, masks="labels")[1] == ["labels: the folder of masks does not exist"]
    with pytest.raises(ConfigError, match="the id 1 is both void and the class 'sky'"):
        dataset(tmp_path, void=1)
    with pytest.raises(ConfigError, match="classes"):
        dataset(tmp_path, classes=["one"])


def test_every_problem_of_an_image_is_listed(tmp_path: Path) -> None:
    pairs(tmp_path, *"abcd")
    (tmp_path / "masks/a.png").unlink()
    clients = {"a": "", "b": "1", "c": "1", "d": "2"}
    lines = [f"images/{name}.jpg,{client}" for name, client in clients.items()]
    (tmp_path / "t.csv").write_text("\n".join(["path,client", *lines]))
    found, told = check(tmp_path, table="t.csv")
    assert told == [
        "images/a.jpg: the image has no mask 'masks/a.png'",
        "t.csv, line 2: the cell 'client' is empty",
    ]
    assert found.bad == {0}


def test_pixels_of_each_class_are_counted_and_masks_without_objects_are_named(tmp_path: Path) -> None:
    pairs(tmp_path, *"abcd")
    write(tmp_path / "masks/b.png", np.zeros((8, 8), np.uint8))
    write(tmp_path / "masks/c.png", np.full((8, 8), 255, np.uint8))
    write(tmp_path / "masks/d.png", np.full((8, 8), 9, np.uint8))  # left out: 9 is no class
    found, said = check(tmp_path, classes=[*CLASSES, "bus"])
    assert len(said) == 1
    a = np.bincount(ids(0).ravel(), minlength=3)
    assert found.facts()["pixels"] == {
        "road": a[0] + 64, "sky": a[1], "car": a[2], "bus": 0, "void": 64
    }  # fmt: skip
    assert [warning.what for warning in found.findings.warnings] == [
        "1 mask shows no class but 'road': masks/b.png",
        "1 mask shows no class, only void: masks/c.png",
        "no mask has a pixel of 'bus'",
    ]


def test_pixels_of_a_class_named_void_are_counted_apart_from_those_without_a_class(tmp_path: Path) -> None:
    pairs(tmp_path, *"ab")
    found, _ = check(tmp_path, classes=["void", "sky", "car"])
    assert found.pixels is not None
    assert list(found.pixels) == ["void", "sky", "car", "no class"]
    assert (sum(found.pixels.values()), found.pixels["no class"]) == (128, 0)
