from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.synthetic import synthetic
from fedlens.data.federated import federate, hold_out, hold_out_each
from fedlens.data.normalize import normalize
from fedlens.data.partition.iid import iid
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.shards import shards


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return synthetic(Path(), False, 0, shape=(1, 4, 4), classes=5, train=200, test=40)


def test_the_images_are_there_once(dataset: Dataset) -> None:
    data, _ = federate(dataset, lambda labels: iid(labels, 0, clients=8))
    assert data.dataset.train.inputs.data_ptr() == dataset.train.inputs.ctypes.data
    assert data.dataset.test.targets.data_ptr() == dataset.test.targets.ctypes.data
    assert data.held_out is None
    assert (data.dataset.classes, data.dataset.mean) == (dataset.classes, dataset.mean)


def test_a_client_knows_the_units_of_its_examples(dataset: Dataset) -> None:
    patients = np.array([f"P{k % 7}" for k in range(200)])
    named = replace(
        dataset, train=replace(dataset.train, columns={"patient": patients, "age": np.arange(200)})
    )
    data, partition = federate(named, lambda labels: iid(labels, 0, clients=8), unit="patient")
    assert list(data.dataset.train.columns) == ["patient"]  # numbers; no text goes to workers
    for client in range(8):
        own = data.data_of(client).take(torch.tensor([3, 0, 5]))
        assert own.units("patient").tolist() == [k % 7 for k in partition[client][[3, 0, 5]]]


def test_units_need_a_column_without_empty_cells(dataset: Dataset) -> None:
    patients = np.array(["P1", " "] * 100)
    named = replace(dataset, train=replace(dataset.train, columns={"patient": patients}))
    with pytest.raises(ConfigError, match=r"no column 'patent'.*privacy\.column.*patient"):
        federate(named, lambda labels: iid(labels, 0, clients=8), unit="patent")
    with pytest.raises(
        DataError, match="100 training examples have no 'patient', the first of them at position 1"
    ):
        federate(named, lambda labels: iid(labels, 0, clients=8), unit="patient")


def test_clients_are_views_of_the_partition(dataset: Dataset) -> None:
    data, partition = federate(dataset, lambda labels: shards(labels, 0, clients=8))
    assert data.clients == len(partition) == 8
    assert partition.dataset == "synthetic"
    assert np.diff(data.offsets).tolist() == partition.sizes().tolist()
    for client in range(8):
        row = data.client_indices(client)
        assert row.tolist() == partition[client].tolist()
        assert row.untyped_storage().data_ptr() == data.indices.untyped_storage().data_ptr()


def test_held_out_examples_go_to_nobody_and_indices_count_in_the_original_split(dataset: Dataset) -> None:
    seen: list[int] = []

    def partitioner(labels: np.ndarray) -> Partition:
        seen.append(len(labels))
        return shards(labels, 0, clients=4)

    data, partition = federate(dataset, partitioner, validation=0.1, seed=3)
    kept, held = hold_out(200, 0.1, 3)
    assert seen == [180]
    assert data.held_out is not None
    assert torch.equal(data.held_out, torch.from_numpy(held))
    assert not set(partition.indices.tolist()) & set(held.tolist())
    plain = shards(dataset.train.targets[kept], 0, clients=4)
    np.testing.assert_array_equal(
        partition.class_counts(dataset.train.targets), plain.class_counts(dataset.train.targets[kept])
    )
    assert partition.spec == plain.spec


def test_holding_out_depends_on_the_seed_alone() -> None:
    kept, held = hold_out(1000, 0.1, 0)
    assert sorted([*kept, *held]) == list(range(1000))
    assert len(held) == 100
    np.testing.assert_array_equal(held, hold_out(1000, 0.1, 0)[1])
    assert (held != hold_out(1000, 0.1, 1)[1]).any()
    assert abs(held.mean() - 500) < 100


def test_a_small_share_still_holds_out_one() -> None:
    assert len(hold_out(10, 0.001, 0)[1]) == 1


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan"), 0.999])
def test_a_share_that_makes_no_sense_is_an_error(dataset: Dataset, share: float) -> None:
    with pytest.raises(ConfigError, match=r"data.validation"):
        federate(dataset, lambda labels: iid(labels, 0, clients=2), validation=share)


def test_a_partitioner_that_points_outside_is_an_error(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="points to example 200 of 200"):
        federate(dataset, lambda labels: Partition(("a",), np.array([200]), np.array([0, 1])))


def test_taking_copies_and_keeps_order(dataset: Dataset) -> None:
    examples = dataset.train.tensors()
    inputs, targets = examples.batch(torch.tensor([5, 3]))
    assert torch.equal(inputs, examples.inputs[[5, 3]])
    assert targets.tolist() == dataset.train.targets[[5, 3]].tolist()


def test_a_read_only_array_is_copied(dataset: Dataset) -> None:
    array = dataset.test.inputs.copy()
    array.flags.writeable = False
    examples = Examples(array, dataset.test.targets).tensors()
    assert examples.inputs.data_ptr() != array.ctypes.data


def test_each_client_holds_out_its_own_share_and_keeps_something(dataset: Dataset) -> None:
    drawn = Partition.of_owners(np.repeat([0, 1, 2, 3], [100, 60, 39, 1]), 4)
    data, partition = federate(dataset, lambda table: drawn, validation=0.25, seed=1, scope="client")
    assert data.held_out is not None
    assert data.held_out_offsets is not None
    counts = np.diff(data.held_out_offsets)
    assert counts[:2].tolist() == [25, 15]
    assert counts[2] in (9, 10)
    assert counts[3] == 0  # it has one example, and trains on it
    for client in range(4):
        held, kept = data.client_held_out(client), data.client_indices(client)
        assert held is not None
        together = np.sort(np.concatenate([held.numpy(), kept.numpy()]))
        np.testing.assert_array_equal(together, drawn[client])
        assert partition[client].tolist() == kept.tolist()
    assert partition.census is not None
    assert partition.census.sizes.tolist() == (drawn.sizes() - counts).tolist()
    other, _ = federate(dataset, lambda table: drawn, validation=0.25, seed=2, scope="client")
    assert other.held_out is not None
    assert other.held_out.tolist() != data.held_out.tolist()


def test_rounding_of_each_clients_share_is_right_on_average() -> None:
    population = Partition.of_owners(np.repeat(np.arange(4000), 3), 4000)
    _, held, offsets = hold_out_each(population, 0.1, 0)
    assert abs(len(held) / 12_000 - 0.1) < 0.01
    assert set(np.diff(offsets).tolist()) == {0, 1}
    # Which of a client's examples it is, is random.
    assert np.bincount(held % 3).min() > 0.25 * len(held)


def test_a_share_that_holds_out_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"0\.5 is too small: no client has a held-out example \(data\.validation\)"
    ):
        hold_out_each(Partition.of_owners([0, 1], 2), 0.5, 0)


def test_the_server_sees_held_out_examples_as_their_clients_do(dataset: Dataset) -> None:
    drawn = Partition.of_owners(np.arange(200) % 4, 4)
    seen = replace(drawn, features={"brightness": np.array([1.0, 0.5, 0.0, 1.5])})
    holders, _ = federate(dataset, lambda table: seen, validation=0.2, seed=0, scope="client")
    data = holders.dataset
    own = [holders.data_of(client) for client in range(4)]
    assert [len(one.validation or ()) for one in own] == np.diff(holders.held_out_offsets).tolist()  # type: ignore[arg-type]
    for name, parts in (("@validation", [one.validation for one in own]), ("@train", own)):
        pooled = holders.data_of(name)
        images, labels = pooled.stretch(0, len(pooled))
        each = [part.stretch(0, len(part)) for part in parts if part is not None]
        assert torch.equal(images, torch.cat([image for image, _ in each]))
        assert torch.equal(labels, torch.cat([label for _, label in each]))
    dark, _ = own[2].stretch(0, 3)
    black = normalize(torch.zeros(3, *data.input_shape, dtype=torch.uint8), data.mean, data.std)
    assert torch.equal(dark, black)
    untouched, _ = holders.data_of("@test").stretch(0, 3)
    assert torch.equal(untouched, normalize(data.test.inputs[:3], data.mean, data.std))


def test_a_pooled_validation_set_is_drawn_before_the_partition(dataset: Dataset) -> None:
    data, _ = federate(dataset, lambda table: iid(table, 0, clients=4), validation=0.1, seed=3)
    assert data.client_held_out(0) is None
    assert data.data_of(0).validation is None
    assert len(data.data_of("@validation")) == 20
    with pytest.raises(KeyError):
        data.data_of("@nobody")


def test_texts_have_no_brightness() -> None:
    split = Examples(np.zeros((4, 3), np.int16), np.array([0, 1, 0, 1]))
    texts = Dataset("letters", split, split, ("a", "b"), (), (), "none", "made up")
    plain = Partition.of_owners([0, 0, 1, 1], 2)
    data, partition = federate(texts, lambda table: plain)
    assert partition.census is not None
    assert partition.census.dense().tolist() == [[1, 1], [1, 1]]
    assert data.dataset.train.batch(torch.tensor([1]))[0].tolist() == [[0, 0, 0]]
    bright = replace(plain, features={"brightness": np.array([1.0, 2.0])})
    with pytest.raises(ConfigError, match="'letters' is text, which has no brightness"):
        federate(texts, lambda table: bright)
