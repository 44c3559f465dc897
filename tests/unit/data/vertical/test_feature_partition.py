"""Partitions of features: which windows and rows the parties of vertical learning have, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.dataset_info import Window
from fedlens.data.partition.partition import Partition
from fedlens.data.vertical.feature_partition import FeaturePartition, load_partition, partition_features


def quadrants(examples: int = 100, overlap: float = 0.8, seed: int = 3) -> FeaturePartition:
    return partition_features(
        examples, (1, 8, 8), seed=seed, split="quadrants", overlap=overlap, dataset="toy"
    )


def small() -> FeaturePartition:
    windows = (Window(0, 0, 2, 2), Window(0, 2, 2, 2))
    return FeaturePartition(
        ("a", "b"), (np.array([4, 0, 2]), np.array([2, 4])), ((1, 2, 2),) * 2, windows, 1, {}, "toy"
    )


def test_all_parties_have_the_overlap_and_the_others_one_party_each() -> None:
    p = quadrants()
    counts = np.bincount(np.concatenate(p.rows), minlength=100)
    assert np.bincount(counts).tolist() == [0, 20, 0, 0, 80]
    assert p.sizes().tolist() == [85] * 4
    assert [int(key) for key in p.shared] == sorted(map(int, p.shared), key=str)
    assert set(map(int, p.shared)) == set(np.flatnonzero(counts == 4).tolist())


def test_each_party_has_an_order_of_its_own_and_the_seed_decides() -> None:
    p = quadrants(overlap=1.0)
    orders = [rows.tolist() for rows in p.rows]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    assert quadrants().digest == quadrants().digest != quadrants(seed=4).digest
    assert p.digest == "07423a76d8976d46b3b8d07386bb5b93763eee5a1bd661c0acc1428e45d835b3"


@pytest.mark.parametrize("split", ["quadrants", "halves", "rows:3", "columns:5", "rows:7"])
def test_the_windows_cover_every_pixel_once_and_differ_by_at_most_one_pixel(split: str) -> None:
    p = partition_features(4, (3, 7, 9), seed=0, split=split)
    seen = np.zeros((7, 9), int)
    for window in p.windows:
        window.of(seen)[...] += 1
    assert (seen == 1).all()
    for sides in zip(*((window.height, window.width) for window in p.windows), strict=True):
        assert max(sides) - min(sides) <= 1


def test_quadrants_are_numbered_row_by_row_from_the_top_left() -> None:
    assert [window[:2] for window in quadrants().windows] == [(0, 0), (0, 4), (4, 0), (4, 4)]
    halves = partition_features(4, (1, 8, 8), seed=0, split="halves").windows
    assert halves == (Window(0, 0, 8, 4), Window(0, 4, 8, 4))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"split": "rows:9"}, "images of 8 x 8 pixels cannot be cut into 9 x 1 windows"),
        ({"split": "columns:9"}, "8 x 8 pixels cannot be cut into 1 x 9 windows"),
        ({"split": "halves", "overlap": 0.04}, "'overlap' is 0.04, which is none of 10 examples"),
    ],
)
def test_what_does_not_fit_the_images_is_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        partition_features(10, (1, 8, 8), seed=0, **settings)
    assert caught.value.where in ("data.parties.split", "data.parties.overlap")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ids": ("a", "a")}, "different names"),
        (
            {
                "ids": ("a",),
                "rows": (np.array([1]),),
                "windows": (Window(0, 0, 1, 1),),
                "shapes": ((1, 1, 1),),
            },
            "at least two parties",
        ),
        ({"windows": (Window(0, 0, 1, 1),)}, "a window for each"),
        ({"shapes": ((1, 1, 1),)}, "a shape and a window for each"),
        ({"shapes": ((1, 2, 2), (2, 2))}, "a shape is not"),
        ({"pictures": (np.zeros((2, 2), np.uint8),)}, "a picture is not uint8"),
        ({"labels_at": 2}, "party 2 has the labels, and the last of the parties is 1"),
        ({"labels_at": -1}, "party -1 has the labels"),
        ({"rows": (np.array([4, 4]), np.array([4]))}, "party 'a' holds an example twice"),
        ({"rows": (np.array([4, 0]), np.array([1]))}, "no example is held by all parties"),
        ({"rows": (np.array([0.5]), np.array([1]))}, "rows are float64"),
        ({"names": (("x", "y"), ("x", "y"))}, "not one id for each example"),
        ({"names": (("x", "y", "y"), ("x", "y"))}, "party 'a' holds an example twice"),
        ({"names": (("7", "8", "9"), ("007", "08"))}, "no example is held by all parties"),
    ],
)
def test_what_is_no_partition_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(DataError, match=what):
        replace(small(), **change)


@pytest.mark.parametrize("names", [None, (("007", "ü", "c\0"), ("ü", "7"))])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, names: object) -> None:
    p = replace(small(), names=names, spec={"name": "parties", "overlap": 0.5})
    p.save(tmp_path / "new" / "p.npz")
    q = load_partition(tmp_path / "new" / "p.npz")
    assert isinstance(q, FeaturePartition)
    assert (q.ids, q.windows, q.labels_at, q.spec, q.dataset, q.names) == (
        p.ids,
        p.windows,
        p.labels_at,
        p.spec,
        p.dataset,
        p.names,
    )
    assert q.digest == p.digest
    assert q.shapes == p.shapes
    assert FeaturePartition.load(tmp_path / "new" / "p.npz").keys == p.keys


def test_pictures_are_saved_and_change_no_digest(tmp_path: Path) -> None:
    pictures = (np.arange(12, dtype=np.uint8).reshape(1, 3, 4), np.ones((3, 2, 2), np.uint8))
    p = replace(small(), pictures=pictures)
    p.save(tmp_path / "p.npz")
    q = FeaturePartition.load(tmp_path / "p.npz")
    assert q.digest == p.digest == small().digest
    assert [picture.tolist() for picture in q.pictures] == [picture.tolist() for picture in pictures]


def test_the_digest_depends_on_all_but_the_spec() -> None:
    p = small()
    assert replace(p, spec={"seed": 9}).digest == p.digest
    for change in (
        {"ids": ("a", "c")},
        {"dataset": "other"},
        {"labels_at": 0},
        {"windows": (Window(0, 0, 2, 2), Window(0, 1, 2, 2))},
        {"rows": (p.rows[0][::-1], p.rows[1])},
        {"names": (("4", "0", "2"), ("2", "4"))},
    ):
        assert replace(p, **change).digest != p.digest


def test_each_kind_of_partition_names_the_format_of_the_other(tmp_path: Path) -> None:
    small().save(tmp_path / "p.npz")
    with pytest.raises(
        DataError, match=r"the format is 'fedlens parties 1', but fedlens reads 'fedlens part"
    ) as caught:
        Partition.load(tmp_path / "p.npz")
    assert caught.value.where == str(tmp_path / "p.npz")
    Partition.of_owners([0, 1], 2).save(tmp_path / "q.npz")
    with pytest.raises(DataError, match="the format is 'fedlens partition 1'"):
        FeaturePartition.load(tmp_path / "q.npz")
    assert isinstance(load_partition(tmp_path / "q.npz"), Partition)


@pytest.mark.parametrize(
    ("head", "what"),
    [
        ({"windows": [[0, 0, 2]] * 2}, "not a readable partition file"),
        ({"windows": 3}, "not a readable partition file"),
        ({"spec": [1]}, "not a readable partition file"),
        ({"ids": ["a", 1]}, "different names"),
        ({"ids": ["a", "b", "c"]}, "not a readable partition file"),
        ({"labels_at": 5}, "party 5 has the labels"),
        ({"labels_at": 0}, "the partition is corrupt: its digest is"),
        ({"names": [[1, 2, 3], [[], 3]]}, "not a readable partition file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, head: dict[str, object], what: str) -> None:
    path = tmp_path / "p.npz"
    small().save(path)
    with np.load(path) as file:
        arrays = dict(file)
    changed = {**json.loads(arrays["head"].tobytes()), **head}
    np.savez(path, **{**arrays, "head": np.frombuffer(json.dumps(changed).encode(), np.uint8)})
    with pytest.raises(DataError, match=what) as caught:
        load_partition(path)
    assert caught.value.where == str(path)
