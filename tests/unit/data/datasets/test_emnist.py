import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.datasets import dataset_files
from fedlens.data.datasets import emnist as module
from fedlens.data.datasets.emnist import SPLITS, emnist
from tests.unit.data.datasets.small_files import zipped
from tests.unit.data.layouts import idx_bytes

COUNTS = (70, 65)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: replace(split, counts=COUNTS) for name, split in SPLITS.items()}
    monkeypatch.setattr(module, "SPLITS", small)


def write(root: Path, split: str, classes: int, first: int = 0, inner: str = ".", suffix: str = "") -> dict:
    """The four files of a split, as NIST publishes them; the arrays by what they are, upright."""
    rng = np.random.default_rng(0)
    folder = root / "EMNIST" / "raw" / inner
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for part, count in zip(("train", "test"), COUNTS, strict=True):
        images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = np.arange(count) % classes
        written[part] = (images, labels)
        for name, content in (
            (f"emnist-{split}-{part}-images-idx3-ubyte", idx_bytes(images.transpose(0, 2, 1), 2051)),
            (f"emnist-{split}-{part}-labels-idx1-ubyte", idx_bytes(labels + first, 2049)),
        ):
            (folder / (name + suffix)).write_bytes(gzip.compress(content) if suffix else content)
    return written


@pytest.mark.parametrize(("inner", "suffix"), [(".", ""), (".", ".gz"), ("gzip", ".gz")])
@pytest.mark.parametrize("split", SPLITS)
def test_images_are_turned_upright_and_labels_count_from_0(
    tmp_path: Path, split: str, inner: str, suffix: str
) -> None:
    classes = len(SPLITS[split].classes)
    written = write(tmp_path, split, classes, 1 if split == "letters" else 0, inner, suffix)
    data = emnist(tmp_path, False, 0, split=split)
    assert (data.name, data.input_shape, data.kind) == ("emnist", (1, 28, 28), "classification")
    assert len(set(data.classes)) == classes
    assert data.source.endswith(f", split {split}")
    for part, name in ((data.train, "train"), (data.test, "test")):
        np.testing.assert_array_equal(part.inputs[:, 0], written[name][0])
        np.testing.assert_array_equal(part.targets, written[name][1])
        assert part.inputs.flags.writeable
    scaled = written["train"][0] / 255
    np.testing.assert_allclose((data.mean[0], data.std[0]), (scaled.mean(), scaled.std()), rtol=1e-9)


def test_the_splits_are_as_published() -> None:
    """Counts and classes of NIST's page; the classes of the 47 by emnist-balanced-mapping.txt."""
    totals = {name: sum(split.counts) for name, split in SPLITS.items()}
    assert totals == {
        "byclass": 814_255,
        "bymerge": 814_255,
        "balanced": 131_600,
        "letters": 145_600,
        "digits": 280_000,
        "mnist": 70_000,
    }
    assert "".join(SPLITS["balanced"].classes) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
    assert SPLITS["byclass"].classes[10] == "A"
    assert SPLITS["byclass"].classes[36] == "a"
    assert "".join(SPLITS["letters"].classes) == "abcdefghijklmnopqrstuvwxyz"


def test_balanced_is_the_default_and_turning_goes_over_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 16)
    written = write(tmp_path, "balanced", 47)
    data = emnist(tmp_path, False, 0)
    np.testing.assert_array_equal(data.train.inputs[:, 0], written["train"][0])
    assert len(data.classes) == 47


@pytest.mark.parametrize(("first", "label"), [(0, -1), (2, 26)])
def test_letters_that_do_not_count_from_1_are_refused(tmp_path: Path, first: int, label: int) -> None:
    write(tmp_path, "letters", 26, first)
    with pytest.raises(DataError, match=f"label {label} of record") as caught:
        emnist(tmp_path, False, 0, split="letters")
    assert "counted from 0" in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.endswith("emnist-letters-train-labels-idx1-ubyte")


def test_missing_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "digits", 10)
    (tmp_path / "EMNIST/raw/emnist-digits-test-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="emnist-digits-test-labels-idx1-ubyte") as caught:
        emnist(tmp_path, False, 0, split="digits")
    assert "train" not in caught.value.what
    assert "--download" in str(caught.value)


def test_another_number_of_images_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "digits", 10)
    path = tmp_path / "EMNIST/raw/emnist-digits-train-images-idx3-ubyte"
    path.write_bytes(idx_bytes(np.zeros((69, 28, 28)), 2051))
    with pytest.raises(DataError, match="header says 69 x 28 x 28, and 70 x 28 x 28 was expected"):
        emnist(tmp_path, False, 0, split="digits")


def test_a_download_is_unpacked_and_used_and_the_archive_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path / "there", "mnist", 10, inner="gzip", suffix=".gz")
    source = tmp_path / "there" / "EMNIST" / "raw"
    (source / "gzip" / "emnist-mnist-mapping.txt").write_text("0 48\n")
    monkeypatch.setattr(dataset_files, "fetch", zipped(source))
    root = tmp_path / "here"
    data = emnist(root, True, 0, split="mnist")
    np.testing.assert_array_equal(data.test.inputs[:, 0], written["test"][0])
    assert sorted(path.name for path in (root / "EMNIST/raw").iterdir()) == ["gzip"]
    assert len(list((root / "EMNIST/raw/gzip").iterdir())) == 4
    shutil.rmtree(source)
    assert len(emnist(root, True, 0, split="mnist").train) == 70
