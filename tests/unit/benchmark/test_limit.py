"""The limit does what it is measured for: federated averaging, the same in any arrangement."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedlens.benchmark.limit import WORKLOADS, BareLimit, Workload, fresh_weights, linear, mnist_cnn

TINY = Workload(
    "tiny", linear, clients=6, examples=25, shape=(1, 28, 28), cohort=3, batch=10, keep_memory=False
)


def rounds(limit: BareLimit, count: int) -> list[torch.Tensor]:
    try:
        assert all(limit.round() > 0 for _ in range(count))
        return [w.clone() for w in limit.weights]
    finally:
        limit.close()


@pytest.mark.parametrize(
    ("name", "parameters"), [("cifar-cnn", 1756426), ("mnist-cnn", 1663370), ("linear", 7850)]
)
def test_the_models_have_the_papers_sizes(name: str, parameters: int) -> None:
    workload = WORKLOADS[name]
    model = workload.model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, *workload.shape)).shape == (2, 10)


def test_two_processes_come_to_the_weights_of_one() -> None:
    here = rounds(BareLimit(TINY, 1, 1), 3)
    there = rounds(BareLimit(TINY, 2, 1), 3)
    start = fresh_weights(TINY)
    for mine, theirs, before in zip(here, there, start, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert not torch.allclose(mine, before)


def test_channels_last_comes_to_the_same_weights_in_another_layout() -> None:
    load = replace(TINY, model=mnist_cnn, clients=2, cohort=2, examples=10)
    plain, inner = (rounds(BareLimit(replace(load, channels_last=last)), 2) for last in (False, True))
    for mine, theirs in zip(plain, inner, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert inner[2].is_contiguous(memory_format=torch.channels_last)  # the weights of the second convolution
    assert not plain[2].is_contiguous(memory_format=torch.channels_last)


def test_a_round_is_federated_averaging() -> None:
    # One full batch: the mean of the clients' steps is a step along the mean of their gradients.
    load = replace(TINY, batch=25, cohort=6)
    trained = rounds(BareLimit(load, 1, 1), 1)
    images, labels = load.tensors()
    model = load.model()
    with torch.no_grad():
        for p, w in zip(model.parameters(), fresh_weights(load), strict=True):
            p.copy_(w)
    nn.functional.cross_entropy(model(images.flatten(0, 1)), labels.flatten()).backward()
    for got, p in zip(trained, model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(got, p.detach() - load.lr * p.grad)


def test_it_knows_nothing_of_fedlens() -> None:
    source = (Path(__file__).parents[3] / "src" / "fedlens" / "benchmark" / "limit.py").read_text(
        encoding="utf-8"
    )
    assert not re.search(r"^\s*(import|from)\s+fedlens", source, flags=re.MULTILINE)
