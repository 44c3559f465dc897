"""The groups of CIFAR-100's classes, from both published forms."""

from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import cifar
from tests.unit.data.layouts import array_opcodes, list_opcodes, pickle_of, with_facts, write_cifar_binary

GROUPS = (np.arange(100) * 7) % 20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cifar10", "cifar100"):
        with_facts(monkeypatch, name, train=150, test=50)


def write(root: Path, form: str, train: np.ndarray, groups: np.ndarray) -> None:
    """Training labels with their groups, and a test file of the first fifty classes."""
    folder = root / f"cifar-100-{form}"
    folder.mkdir()
    for name, fine, coarse in (("train", train, groups), ("test", np.arange(50), GROUPS[:50])):
        pixels = np.zeros((len(fine), 3072), np.uint8)
        if form == "binary":
            records = np.concatenate([coarse[:, None], fine[:, None], pixels], axis=1).astype(np.uint8)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            entries = {
                "data": array_opcodes(pixels),
                "fine_labels": list_opcodes(fine.tolist()),
                "coarse_labels": list_opcodes(coarse.tolist()),
            }
            (folder / name).write_bytes(pickle_of(entries))


FINE = np.concatenate([np.arange(100)[::-1], np.arange(50)])


@pytest.mark.parametrize("form", ["binary", "python"])
def test_each_class_has_the_group_that_its_images_say(tmp_path: Path, form: str) -> None:
    write(tmp_path, form, FINE, GROUPS[FINE])
    data = cifar.cifar100(tmp_path, False, 0)
    assert data.coarse is not None
    assert data.coarse.dtype == np.int64
    np.testing.assert_array_equal(data.coarse, GROUPS)
    np.testing.assert_array_equal(data.train.targets, FINE)
    table = data.table()
    assert table.coarse is not None
    np.testing.assert_array_equal(table.coarse, GROUPS)


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("at", [0, 120])
def test_a_class_in_two_groups_is_refused(tmp_path: Path, form: str, at: int) -> None:
    groups = GROUPS[FINE].copy()
    groups[at] = (groups[at] + 1) % 20
    fine = FINE.copy()
    fine[99] = 99  # so that the class of record 0 comes twice in the training file
    groups[99] = GROUPS[99]
    write(tmp_path, form, fine, groups)
    with pytest.raises(DataError, match="is in the group") as caught:
        cifar.cifar100(tmp_path, False, 0)
    assert f"class {fine[at]} " in caught.value.what


def test_the_test_split_has_to_say_the_same(tmp_path: Path) -> None:
    write(tmp_path, "binary", FINE, (GROUPS[FINE] + 1) % 20)
    with pytest.raises(
        DataError, match="record 0 of class 0 is in the group 0, and another one in 1"
    ) as caught:
        cifar.cifar100(tmp_path, False, 0)
    assert str(caught.value.where).endswith("test.bin")


def test_cifar10_has_no_groups_nor_has_a_class_without_images(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, CATALOGUE["cifar10"])
    assert cifar.cifar10(tmp_path, False, 0).coarse is None
    write(tmp_path, "binary", np.zeros(150, np.int64), np.zeros(150, np.int64))
    assert cifar.cifar100(tmp_path, False, 0).coarse is None


def test_drawn_places_are_columns_of_both_splits_and_said_to_be_drawn(tmp_path: Path) -> None:
    write(tmp_path, "binary", FINE, GROUPS[FINE])
    plain = cifar.cifar100(tmp_path, False, 0)
    assert (plain.train.columns, plain.seeded, plain.notes) == ({}, False, ())
    data, other = (cifar.cifar100(tmp_path, False, seed, places="drawn") for seed in (0, 1))
    for split, n in ((data.train, 150), (data.test, 50)):
        assert {name: len(column) for name, column in split.columns.items()} == {"lat": n, "lon": n}
    assert data.seeded
    assert "drawn, not published" in data.notes[0]
    assert not np.array_equal(data.train.columns["lat"], other.train.columns["lat"])


def test_places_need_the_groups(tmp_path: Path) -> None:
    write(tmp_path, "binary", np.zeros(150, int), GROUPS[np.zeros(150, int)])
    with pytest.raises(DataError, match="needs the group of each class"):
        cifar.cifar100(tmp_path, False, 0, places="drawn")
