import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets import dataset_files
from fedlens.data.datasets.places365 import places365
from fedlens.data.download import Resource
from tests.unit.data.datasets.small_files import shown, write_photo

CATEGORIES = ["/a/airfield", "/a/apartment_building/outdoor", "/z/zen_garden"]
COLOURS = [(50 * at, 100, 200) for at in range(3)]
TRAIN = [f"{category}/0000000{at}.jpg" for category in CATEGORIES for at in (1, 2)]
VAL = [2, 0, 0, 1]


def write(root: Path, train: str = "data_256", val: str = "val_256") -> Path:
    """Two training images a category and four validation images, with the published lists."""
    for at, name in enumerate(TRAIN):
        write_photo(root / train / name[1:], COLOURS[at // 2], (256, 256))
    names = [f"Places365_val_0000000{at}.jpg" for at in range(1, 5)]
    for name, label in zip(names, VAL, strict=True):
        write_photo(root / val / name, COLOURS[label], (256, 256))
    write_list(root / "categories_places365.txt", CATEGORIES, [0, 1, 2])
    write_list(root / "places365_train_standard.txt", TRAIN, [0, 0, 1, 1, 2, 2])
    write_list(root / "places365_val.txt", names, VAL)
    return root


def write_list(path: Path, names: list[str], labels: list[int]) -> None:
    path.write_text("".join(f"{name} {label}\n" for name, label in zip(names, labels, strict=True)))


@pytest.mark.parametrize("folder", ["places365", "."])
@pytest.mark.parametrize(
    ("small", "train", "val"),
    [
        (True, "data_256", "val_256"),
        (True, "data_256_standard", "val_256"),
        (False, "data_large", "val_large"),
        (False, "data_large_standard", "val_large"),
    ],
)
def test_lists_and_images_are_read(tmp_path: Path, folder: str, small: bool, train: str, val: str) -> None:
    write(tmp_path / folder, train, val)
    data = places365(tmp_path, False, 0, small=small, size=32)
    assert data.classes == ("airfield", "apartment_building/outdoor", "zen_garden")
    assert data.train.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.targets.tolist() == VAL
    assert (data.kind, data.input_shape) == ("classification", (3, 32, 32))
    for split in (data.train, data.test):
        images = split.inputs.take(np.arange(len(split)))
        assert [shown(image) for image in images] == [COLOURS[label] for label in split.targets]


def test_the_usual_form_is_small_at_224(tmp_path: Path) -> None:
    write(tmp_path)
    assert places365(tmp_path, False, 0).input_shape == (3, 224, 224)


@pytest.mark.parametrize(
    ("name", "text", "what", "place"),
    [
        ("places365_val.txt", "Places365_val_00000001.jpg\n", "is not a name and a number", ", line 1"),
        ("places365_val.txt", "Places365_val_00000001.jpg 3\n", r"class 3 is not in 0 \.\. 2", ", line 1"),
        ("places365_val.txt", "Places365_val_00000009.jpg 1\n", "1 of the 1 images", ""),
        ("places365_train_standard.txt", "/a/airfield/1.jpg -1\n", "is not a name and a number", ", line 1"),
        ("categories_places365.txt", "/a/airfield 0\n/b/bar 2\n", "are not 0, 1, 2", ""),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, text: str, what: str, place: str
) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=what) as caught:
        places365(tmp_path, False, 0)
    assert caught.value.where == f"{tmp_path / name}{place}"


def test_missing_lists_and_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "places365_val.txt").unlink()
    with pytest.raises(
        DataError, match=r"missing places365_val\.txt, data_large or data_large_standard, val_large"
    ):
        places365(tmp_path, False, 0, small=False)


def test_a_download_fetches_what_is_missing_and_removes_the_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = write(tmp_path / "there")
    fetched = []

    def fetch(resource: Resource, folder: Path) -> Path:
        """The lists lie in their archive without a folder, the images in theirs."""
        fetched.append(resource.name)
        folder.mkdir(parents=True, exist_ok=True)
        inner = {"train_256_places365standard.tar": "data_256", "val_256.tar": "val_256"}.get(resource.name)
        with tarfile.open(folder / resource.name, "w") as tar:
            for path in [there / inner] if inner else there.glob("*.txt"):
                tar.add(path, path.relative_to(there).as_posix())
        return folder / resource.name

    monkeypatch.setattr(dataset_files, "fetch", fetch)
    data = places365(tmp_path / "here", True, 0)
    assert (len(data.train), len(data.test)) == (6, 4)
    assert fetched == ["filelist_places365-standard.tar", "train_256_places365standard.tar", "val_256.tar"]
    assert sorted(path.name for path in (tmp_path / "here" / "places365").iterdir()) == [
        "categories_places365.txt",
        "data_256",
        "places365_train_standard.txt",
        "places365_val.txt",
        "val_256",
    ]
    places365(tmp_path / "here", True, 0)
    assert len(fetched) == 3
