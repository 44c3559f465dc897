from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets.imagenet import class_names, imagenet
from tests.unit.data.datasets.small_files import shown, write_photo

# As in the devkit: numbers are not in the order of the WordNet ids, and two classes are called crane.
SYNSETS = [(1, "n02119789", "kit fox, Vulpes macrotis"), (2, "n02012849", "crane"), (3, "n03126707", "crane")]
COLOURS = {wnid: (100, 50 * at, 200) for at, (_, wnid, _) in enumerate(SYNSETS)}
WNIDS = sorted(COLOURS)
NAMES = ("crane (n02012849)", "kit fox", "crane (n03126707)")


def write(root: Path, name: str = "imagenet") -> Path:
    """Training images in class folders; the devkit's four validation images are written by the tests."""
    folder = root / name
    for wnid in WNIDS:
        for number in range(2):
            write_photo(folder / "train" / wnid / f"{wnid}_{number}.JPEG", COLOURS[wnid], (50, 40))
    return folder


def write_flat(folder: Path, numbers: list[int]) -> Path:
    """Validation images as they come out of the archive, and the devkit; the folder of its files."""
    from scipy.io import savemat

    wnids = {number: wnid for number, wnid, _ in SYNSETS}
    for at, number in enumerate(numbers, start=1):
        write_photo(folder / "val" / f"ILSVRC2012_val_{at:08d}.JPEG", COLOURS[wnids[number]], (50, 40))
    data = folder / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{n}\n" for n in numbers))
    synsets = np.zeros((3, 1), [(key, object) for key in ("ILSVRC2012_ID", "WNID", "words", "num_children")])
    for row, (number, wnid, words) in enumerate(SYNSETS):
        synsets[row, 0] = (float(number), wnid, words, 0.0)
    savemat(data / "meta.mat", {"synsets": synsets})
    return data


def check(data, val: list[str]) -> None:
    assert data.train.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.targets.tolist() == [WNIDS.index(wnid) for wnid in val]
    for split in (data.train, data.test):
        images = split.inputs.take(np.arange(len(split)))
        assert [shown(image) for image in images] == [COLOURS[WNIDS[label]] for label in split.targets]


@pytest.mark.parametrize("name", ["imagenet", "ILSVRC2012"])
def test_both_splits_in_class_folders(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, name)
    for wnid in WNIDS[::2]:
        write_photo(folder / "val" / wnid / "ILSVRC2012_val_00000009.JPEG", COLOURS[wnid], (50, 40))
    data = imagenet(tmp_path, False, 0, size=32)
    check(data, WNIDS[::2])
    assert (data.input_shape, data.classes) == ((3, 32, 32), tuple(WNIDS))
    assert imagenet(tmp_path, False, 0).input_shape == (3, 224, 224)


def test_flat_validation_images_get_their_classes_from_the_devkit(tmp_path: Path) -> None:
    write_flat(write(tmp_path), [3, 1, 2, 3])
    data = imagenet(tmp_path, False, 0, size=32)
    check(data, ["n03126707", "n02119789", "n02012849", "n03126707"])
    assert data.classes == NAMES


@pytest.mark.parametrize(("name", "separator"), [("LOC_synset_mapping.txt", " "), ("words.txt", "\t")])
def test_names_come_from_the_files_that_have_them(tmp_path: Path, name: str, separator: str) -> None:
    folder = write(tmp_path)
    write_photo(folder / "val" / WNIDS[0] / "a.JPEG", COLOURS[WNIDS[0]])
    (folder / name).write_text("".join(f"{wnid}{separator}{words}\n" for _, wnid, words in SYNSETS))
    assert imagenet(tmp_path, False, 0).classes == NAMES


def test_names_are_told_apart() -> None:
    assert class_names(["a", "b", "c"], {"a": "x, y", "b": "z"}) == ("x", "z", "c")


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with pytest.raises(DataError, match="--download does not fetch it") as caught:
        imagenet(tmp_path, True, 0)
    assert "image-net.org" in str(caught.value.hint)
    data = write_flat(folder, [1, 2, 3])
    truth = data / "ILSVRC2012_validation_ground_truth.txt"
    for text, what, place in (
        ("1\n2\n", "the list has 2 classes, and there are 3 images", truth.name),
        ("1\n4\n3\n", "the class '4' has no training folder", f"{truth.name}, line 2"),
        ("1\nfox\n3\n", "the class 'fox' has no training folder", f"{truth.name}, line 2"),
    ):
        truth.write_text(text)
        with pytest.raises(DataError, match=what) as caught:
            imagenet(tmp_path, False, 0)
        assert str(caught.value.where).endswith(place)
    assert "add the folder of this class to" in str(caught.value.hint)
    assert "remove the file" not in str(caught.value.hint)
    (data / "meta.mat").write_bytes(b"damaged")
    with pytest.raises(DataError, match="the file cannot be read"):
        imagenet(tmp_path, False, 0)
    (data / "meta.mat").unlink()
    with pytest.raises(DataError, match="not in class folders, and the list of their classes is missing"):
        imagenet(tmp_path, False, 0)
    (folder / "val" / "n00000001").mkdir()
    with pytest.raises(DataError, match="the folder 'n00000001' is of no class"):
        imagenet(tmp_path, False, 0)
    (folder / "train" / "cats").mkdir()
    with pytest.raises(DataError, match="the folder 'cats' is not called by a WordNet id"):
        imagenet(tmp_path, False, 0)


def test_an_empty_class_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    write_photo(folder / "val" / WNIDS[0] / "a.JPEG", COLOURS[WNIDS[0]])
    (folder / "train" / "n09999999").mkdir()
    with pytest.raises(DataError, match="there are no images in the folder"):
        imagenet(tmp_path, False, 0)
    (folder / "train" / "n09999998").mkdir()
    with pytest.raises(DataError, match=r"2 problems in the data\n.*n09999998: .*\n.*n09999999: ") as caught:
        imagenet(tmp_path, False, 0)
    assert caught.value.hint == "unpack the archives again"
