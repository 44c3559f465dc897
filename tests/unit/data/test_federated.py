from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.core.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.synthetic import synthetic
from fedlens.data.federated import TensorExamples, federate, hold_out
from fedlens.data.partition.iid import iid
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.shards import shards


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return synthetic(Path(), False, 0, shape=(1, 4, 4), classes=5, train=200, test=40)


def test_the_images_are_there_once(dataset: Dataset) -> None:
    data, _ = federate(dataset, lambda labels: iid(labels, 0, clients=8))
    assert data.train.inputs.data_ptr() == dataset.train.inputs.ctypes.data
    assert data.test.targets.data_ptr() == dataset.test.targets.ctypes.data
    assert data.held is None
    assert (data.classes, data.mean, data.std, data.input_shape) == (
        dataset.classes,
        dataset.mean,
        dataset.std,
        (1, 4, 4),
    )


def test_clients_are_views_of_the_partition(dataset: Dataset) -> None:
    data, partition = federate(dataset, lambda labels: shards(labels, 0, clients=8))
    assert data.clients == len(partition) == 8
    assert partition.dataset == "synthetic"
    assert data.sizes().tolist() == partition.sizes().tolist()
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
    assert data.held is not None
    assert torch.equal(data.held, torch.from_numpy(held))
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
    examples = TensorExamples.of(dataset.train)
    taken = examples.take(torch.tensor([5, 3]))
    assert len(taken) == 2
    assert torch.equal(taken.inputs, examples.inputs[[5, 3]])
    assert taken.targets.tolist() == dataset.train.targets[[5, 3]].tolist()


def test_a_read_only_array_is_copied(dataset: Dataset) -> None:
    array = dataset.test.inputs.copy()
    array.flags.writeable = False
    examples = TensorExamples.of(Examples(array, dataset.test.targets))
    assert examples.inputs.data_ptr() != array.ctypes.data
