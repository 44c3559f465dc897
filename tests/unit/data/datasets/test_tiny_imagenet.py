import shutil
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets import dataset_files
from fedlens.data.datasets.tiny_imagenet import tiny_imagenet
from fedlens.data.images import ImageFiles
from tests.unit.data.datasets.small_files import shown, write_photo, zipped

CLASSES = {"n03444034": "go-kart", "n01443537": "goldfish, Carassius auratus", "n02012849": "crane"}
COLOURS = {wnid: (50 * at, 100, 200) for at, wnid in enumerate(CLASSES)}


def write(root: Path) -> Path:
    """Three classes of three training images, four validation images, as published."""
    folder = root / "tiny-imagenet-200"
    for wnid in CLASSES:
        for number in range(3):
            write_photo(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", COLOURS[wnid])
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t10\t63\t58\n")
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in CLASSES))
    words = "".join(f"{wnid}\t{name}\n" for wnid, name in CLASSES.items())
    (folder / "words.txt").write_text("n00001740\tentity\n" + words)
    lines = []
    for number, wnid in enumerate([*CLASSES, "n03444034"]):
        write_photo(folder / "val" / "images" / f"val_{number}.JPEG", COLOURS[wnid])
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "test" / "images").mkdir(parents=True)
    return folder


def test_training_folders_and_annotated_validation_images_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    data = tiny_imagenet(tmp_path, False, 0)
    assert data.classes == ("goldfish", "crane", "go-kart")
    assert (data.name, data.kind, data.input_shape) == ("tiny-imagenet", "classification", (3, 64, 64))
    assert isinstance(data.train.inputs, ImageFiles)
    assert data.train.targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.test.targets.tolist() == [2, 0, 1, 2]
    order = sorted(CLASSES)
    for split in (data.train, data.test):
        images = split.inputs.take(np.arange(len(split)))
        assert [shown(image) for image in images] == [COLOURS[order[label]] for label in split.targets]
    assert data.train.inputs.path(3) == tmp_path / "tiny-imagenet-200/train/n02012849/images/n02012849_0.JPEG"
    assert data.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("name", ["wnids.txt", "words.txt", "val/val_annotations.txt"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / name).unlink()
    with pytest.raises(DataError, match=f"missing tiny-imagenet-200/{name}"):
        tiny_imagenet(tmp_path, False, 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda f: (f / "val/images/val_2.JPEG").unlink(), "1 of the 4 images .*val_2.JPEG of line 3"),
        (lambda f: shutil.rmtree(f / "train/n01443537"), "the class n01443537 has no folder"),
        (lambda f: (f / "train/n01443537").rename(f / "train/n0"), "the folder 'n0' is of no class"),
        (lambda f: shutil.rmtree(f / "train/n01443537/images"), "there are no images in the folder"),
        (
            lambda f: (f / "val/val_annotations.txt").write_text("val_0.JPEG\tn9\t0\t0\t1\t1\n"),
            "the class 'n9' is not in wnids.txt",
        ),
        (lambda f: (f / "val/val_annotations.txt").write_text("val_0.JPEG\n"), "there is no class"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, change, what: str) -> None:
    change(write(tmp_path))
    with pytest.raises(DataError, match=what):
        tiny_imagenet(tmp_path, False, 0)


def test_a_download_is_unpacked_without_the_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "there")
    write_photo(folder / "test" / "images" / "test_0.JPEG", (0, 0, 0))
    monkeypatch.setattr(dataset_files, "fetch", zipped(tmp_path / "there"))
    assert len(tiny_imagenet(tmp_path, True, 0).train) == 9
    assert not (tmp_path / "tiny-imagenet-200" / "test").exists()
    assert not (tmp_path / "tiny-imagenet-200.zip").exists()
