"""Several holders' images at once, and where the examples of their batches are."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens.core.random import Rng
from fedlens.data.augment import PadCropFlip
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.datasets.digits import digits
from fedlens.data.federated import federate
from fedlens.data.partition.partition import Partition


def holders(augment=None) -> ClientDatasets:
    owners = np.random.RandomState(0).randint(0, 5, len(digits(Path(), False, 0).train))
    data, _ = federate(
        digits(Path(), False, 0), lambda table: Partition.of_owners(owners, 5, spec={}), augment=augment
    )
    return data


@pytest.mark.parametrize("size", [1, 7, 32, 10_000])
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_orders_are_where_the_examples_of_the_batches_are(size: int, steps: int) -> None:
    holding = holders().holder(2)
    size = min(size, len(holding))
    other = holders().holder(1)
    both = holding.orders([holding, other], [size, 1], [Rng((1, "a")), Rng((2,))], [steps, 1])
    assert both.shape == (steps, 2, size)
    assert (both[1:, 1] == -1).all()  # it has one step
    assert (both[0, 1, 1:] == -1).all()
    orders = both[:, 0]
    images, labels = holding.stretch(0, len(holding))
    for row, (inputs, targets) in zip(
        orders, islice(holding.batches(size, Rng((1, "a"))), steps), strict=True
    ):
        at = row[row >= 0]
        assert torch.equal(row[: len(at)], at)  # what is missing is at the end
        assert torch.equal(images[at], inputs)
        assert torch.equal(labels[at], targets)


def test_what_is_gathered_is_what_each_holder_sees() -> None:
    there = holders()
    three = [there.holder(k) for k in (3, 0, 3)]
    assert three[0].beside(three[1:])
    places = torch.cat([each.indices for each in three])
    images, labels = three[0].gather(places)
    alone = [each.stretch(0, len(each)) for each in three]
    assert torch.equal(images, torch.cat([inputs for inputs, _ in alone]))
    assert torch.equal(labels, torch.cat([targets for _, targets in alone]))


def test_what_is_not_simply_read_is_not_gathered() -> None:
    there = holders()
    one = there.holder(1)
    assert not one.beside([there.holder("@test")])  # of another set
    bent = holders(PadCropFlip()).holder(1)
    assert not bent.beside([])
    assert not one.beside([bent])
    shaded = replace(one, features={"brightness": torch.ones(1)})
    assert not one.beside([shaded])
