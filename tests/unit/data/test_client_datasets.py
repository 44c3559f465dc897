"""Several holders' images at once, and where the examples of their batches are."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.core.random import Rng
from fedlens.data.augmentation.augment import PadCropFlip
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.datasets.digits import digits
from fedlens.data.federated import federate
from fedlens.data.partition.partition import Partition


def holders(augment=None) -> ClientDatasets:
    owners = np.random.RandomState(0).randint(0, 5, len(digits(Path(), False, 0).train))
    data, _ = federate(digits(Path(), False, 0), lambda table: Partition.of_owners(owners, 5, spec={}))
    return replace(data, augment=augment)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [1, 7, 32, 10_000])
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_orders_are_where_the_examples_of_the_batches_are(size: int, steps: int, whole: bool) -> None:
    there = holders()
    holding, other = there.data_of(2), there.data_of(1)
    size = min(size, len(holding))
    group = holding.group([other])
    assert group is not None
    both = group.batches([size, 1], [Rng((1, "a")), Rng((2,))], [steps, 1], whole)
    turned = group.reordered([1, 0]).batches([1, size], [Rng((2,)), Rng((1, "a"))], [1, steps], whole)
    assert torch.equal(turned, both.flip(1))
    assert both.shape == (steps, 2, size)
    assert (both[1:, 1] == -1).all()  # it has one step
    assert (both[0, 1, 1:] == -1).all()
    orders = both[:, 0]
    for row, (inputs, targets) in zip(
        orders, islice(holding.batches(size, Rng((1, "a")), whole), steps), strict=True
    ):
        at = row[row >= 0]
        assert len(at) == size or not whole
        assert torch.equal(row[: len(at)], at)  # what is missing is at the end
        images, labels = group.read(at)
        assert torch.equal(images, inputs)
        assert torch.equal(labels, targets)


@pytest.mark.parametrize("size", [7, 10_000])
def test_without_randomness_the_batches_are_the_stretches_of_each_holder(size: int) -> None:
    there = holders()
    holding = there.data_of(2)
    size = min(size, len(holding))
    group = there.data_of(1).group([holding])
    assert group is not None
    found = group.batches([1, size], None, [1, -(-len(holding) // size)])[:, 1]
    for row, (inputs, targets) in zip(found, holding.stretches(0, len(holding), size), strict=True):
        images, labels = group.read(row[row >= 0])
        assert torch.equal(images, inputs)
        assert torch.equal(labels, targets)


def test_what_is_gathered_is_what_each_holder_sees() -> None:
    there = holders()
    three = [there.data_of(k) for k in (3, 0, 3)]
    group = three[0].group(three[1:])
    assert group is not None
    assert list(group.counts) == [len(each) for each in three]
    assert there.group([3, 0, 3]) is not None
    images, labels = group.read(torch.cat([each.indices for each in three]))
    alone = [each.stretch(0, len(each)) for each in three]
    assert torch.equal(images, torch.cat([inputs for inputs, _ in alone]))
    assert torch.equal(labels, torch.cat([targets for _, targets in alone]))


def test_what_is_not_simply_read_is_not_gathered() -> None:
    there = holders()
    one = there.data_of(1)
    assert one.group([there.data_of("@test")]) is None  # of another set
    bent = holders(Chain((PadCropFlip(),))).data_of(1)
    assert bent.group([]) is None
    assert one.group([bent]) is None
    shaded = replace(one, features={"brightness": torch.ones(1)})
    assert one.group([shaded]) is None
    assert there.group([1, "@train"]) is None
    assert holders(Chain((PadCropFlip(),))).group([1]) is None
    assert replace(there, features={"brightness": torch.ones(5)}).group([1]) is None


def test_the_group_of_some_clients_is_that_of_their_holders() -> None:
    there, clients = holders(), [4, 1, 2]
    first, *others = [there.data_of(k) for k in clients]
    sizes, rngs, steps = [3, 3, 50], [Rng((k,)) for k in clients], [4, 9, 2]
    by_client, by_holder = there.group(clients), first.group(others)
    assert by_client is not None
    assert by_holder is not None
    assert list(by_client.counts) == list(by_holder.counts)
    assert torch.equal(by_client.batches(sizes, rngs, steps), by_holder.batches(sizes, rngs, steps))
