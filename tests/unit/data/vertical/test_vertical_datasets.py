"""What a party reads: its own window of its own rows, normalized, and labels at one party alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles, Paths
from fedlens.data.loading import loaded
from fedlens.data.normalize import normalize
from fedlens.data.vertical.vertical_datasets import (
    VerticalDatasets,
    federate_parties,
    party_facts,
    vertical_datasets,
    with_pictures,
)
from tests.unit.data.pictures import write

SETTINGS: dict[str, Any] = {"split": "quadrants", "labels_at": 2, "overlap": 0.5}


def dataset(train: int = 12, test: int = 5) -> Dataset:
    rng = np.random.default_rng(0)
    splits = [
        Examples(rng.integers(0, 256, (n, 3, 6, 8)).astype(np.uint8), np.arange(n) % 3) for n in (train, test)
    ]
    return Dataset("toy", *splits, ("a", "b", "c"), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "none", "made up")


def parties(data: Dataset) -> VerticalDatasets:
    client_data, partition = federate_parties(data, 0, **SETTINGS)
    assert client_data.offsets.tolist() == np.cumsum([0, *partition.sizes()]).tolist()
    assert torch.equal(client_data.client_indices(1), torch.from_numpy(partition.rows[1].copy()))
    return vertical_datasets(client_data.dataset, partition)


def test_a_party_reads_its_window_of_its_rows_normalized() -> None:
    data, (_, partition) = dataset(), federate_parties(dataset(), 0, **SETTINGS)
    source = parties(data)
    whole = normalize(torch.from_numpy(data.train.inputs), data.mean, data.std)
    corners = [(slice(0, 3), slice(0, 4)), (slice(0, 3), slice(4, 8)), (slice(3, 6), slice(0, 4))]
    for k, (lines, columns) in enumerate([*corners, (slice(3, 6), slice(4, 8))]):
        party, at = source.data_of(k), torch.tensor([3, 0, 3])
        assert party.ids == tuple(map(str, partition.rows[k].tolist()))
        assert torch.equal(party.inputs(at), whole[partition.rows[k][at], :, lines, columns])
        assert (len(party), party.input_shape, party.classes) == (len(partition.rows[k]), (3, 3, 4), 3)
    assert source.largest == max(partition.sizes())


def test_one_party_alone_has_labels() -> None:
    data = dataset()
    source = parties(data)
    holder = source.data_of(2)
    at = torch.arange(len(holder))
    assert holder.labels(at).tolist() == [int(name) % 3 for name in holder.ids]
    assert holder.held["@test"].labels(torch.tensor([4, 1])).tolist() == [1, 1]
    for k in (0, 1, 3):
        party = source.data_of(k)
        assert not party.has_labels
        assert party.examples.targets.numel() == party.held["@test"].examples.targets.numel() == 0
        with pytest.raises(DataError, match="this party has no labels"):
            party.labels(at)
        with pytest.raises(DataError, match="this party has no labels"):
            party.held["@test"].labels(at)


def test_the_test_images_are_cut_in_the_same_order_at_all_parties() -> None:
    data = dataset()
    source = parties(data)
    tests = [source.data_of(k).held["@test"] for k in range(4)]
    assert len({test.ids for test in tests}) == 1
    assert not set(tests[0].ids) & set(source.data_of(0).ids)
    a, b, c, d = (test.inputs(torch.arange(5)) for test in tests)
    put_together = torch.cat([torch.cat([a, b], -1), torch.cat([c, d], -1)], -2)
    whole = source.data_of("@test")
    assert torch.equal(put_together, whole.stretch(0, 5)[0])
    for name in ("@train", "@validation"):
        with pytest.raises(KeyError):
            source.data_of(name)


@pytest.mark.parametrize("cache", [0, 2**20])
def test_images_in_files_give_the_same_bits_in_memory_and_decoded_on_demand(
    tmp_path: Path, cache: int
) -> None:
    for name in ("a.png", "b.png", "c.png", "d.png"):
        write(tmp_path / name, ord(name[0]))
    files = Examples(
        ImageFiles(tmp_path, Paths.of(["a.png", "b.png", "c.png", "d.png"]), 3, 6, 8), np.array([0, 1, 2, 1])
    )
    lazy = loaded(replace(dataset(), train=files, test=files.take(np.arange(2))), cache)
    assert lazy.train.lazy is (cache == 0)
    pixels = torch.from_numpy(files.inputs.take(np.arange(4)))
    source = parties(lazy)
    party = source.data_of(3)
    at = torch.arange(len(party))
    expected = normalize(pixels, lazy.mean, lazy.std)[[int(name) for name in party.ids], :, 3:, 4:]
    assert torch.equal(party.inputs(at), expected)
    assert party.input_shape == (3, 3, 4)
    assert torch.equal(
        source.data_of(2).labels(at), torch.tensor([[0, 1, 2, 1][int(i)] for i in source.data_of(2).ids])[at]
    )


def test_on_a_device_the_same_is_read() -> None:
    source = parties(dataset())
    moved = source.on(torch.device("cpu"))
    at = torch.arange(3)
    for k in range(4):
        assert torch.equal(moved.data_of(k).inputs(at), source.data_of(k).inputs(at))
        assert torch.equal(
            moved.data_of(k).held["@test"].inputs(at), source.data_of(k).held["@test"].inputs(at)
        )
        assert moved.data_of(k).examples.device == torch.device("cpu")


def test_the_facts_have_the_shape_of_each_window() -> None:
    _, partition = federate_parties(dataset(), 0, **SETTINGS)
    facts = party_facts(partition, "ids")
    assert facts is not None
    assert (facts.shapes, facts.windows, facts.labels_at) == (((3, 3, 4),) * 4, partition.windows, 2)


@pytest.mark.parametrize(
    ("targets", "kind"),
    [(np.ones((4, 3), np.uint8), "multi-label"), (np.ones((4, 6, 8), np.uint8), "segmentation")],
)
def test_examples_of_another_kind_are_refused(targets: np.ndarray, kind: str) -> None:
    split = Examples(np.zeros((4, 3, 6, 8), np.uint8), targets)
    with pytest.raises(ConfigError, match=f"images of one class each, and 'toy' is for {kind}") as caught:
        federate_parties(replace(dataset(), train=split, test=split), 0, **SETTINGS)
    assert caught.value.where == "data.parties"


def test_a_picture_is_the_whole_first_test_image_and_a_large_one_is_thinned_out() -> None:
    data = dataset()
    client_data, partition = federate_parties(data, 0, **SETTINGS)
    (picture,) = with_pictures(partition, client_data.dataset).pictures
    np.testing.assert_array_equal(picture, data.test.inputs[0])
    rng = np.random.default_rng(0)
    split = Examples(rng.integers(0, 256, (3, 2, 900, 10)).astype(np.uint8), np.array([0, 1, 1]))
    large = replace(data, train=split, test=split, mean=(0.0,) * 2, std=(1.0,) * 2)
    client_data, partition = federate_parties(large, 0, **SETTINGS)
    (picture,) = with_pictures(partition, client_data.dataset).pictures
    np.testing.assert_array_equal(picture, split.inputs[0, :1, ::3, ::3])


def test_validation_examples_are_those_of_all_parties_and_nobody_trains_on_them() -> None:
    data = dataset(train=40)
    client_data, partition = federate_parties(data, 0, 0.25, 7, **SETTINGS)
    source = vertical_datasets(client_data.dataset, partition, client_data.held_out)
    held = [source.data_of(k).held["@validation"] for k in range(4)]
    assert client_data.held() == {
        "@test": 5,
        "@train": 80,
        "@validation": 5,
    }  # a quarter of the 20 of all parties
    assert len({examples.ids for examples in held}) == 1
    assert not any(set(held[0].ids) & set(keys) for keys in partition.keys)
    rows, every = torch.tensor([int(name) for name in held[0].ids]), torch.arange(5)
    (whole,) = source.data_of("@validation").stretches(0, 5, 5)
    assert torch.equal(held[2].inputs(every), whole[0][:, :, 3:, :4])
    assert torch.equal(whole[0], normalize(torch.from_numpy(data.train.inputs)[rows], data.mean, data.std))
    assert torch.equal(held[2].labels(every), torch.from_numpy(data.train.targets)[rows])
    with pytest.raises(DataError, match="no labels"):
        held[0].labels(every)


def test_which_examples_are_held_out_depends_on_their_seed_alone() -> None:
    _, first = federate_parties(dataset(train=40), 0, 0.25, 7, **SETTINGS)
    _, again = federate_parties(dataset(train=40), 0, 0.25, 7, **SETTINGS)
    _, other = federate_parties(dataset(train=40), 0, 0.25, 8, **SETTINGS)
    assert first.digest == again.digest != other.digest
