"""The k-NN accuracy against a loop over examples, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.tasks import nearest_neighbours
from fedlens.tasks.nearest_neighbours import knn_accuracy


def loop(
    features: list[list[float]],
    labels: list[int],
    tests: list[list[float]],
    truth: list[int],
    k: int,
    t: float,
) -> float:
    """Wu et al. 2018, section 3.4, one test example after the other."""
    right = 0
    for test, true in zip(tests, truth, strict=True):
        similar = []
        for known, label in zip(features, labels, strict=True):
            dot = sum(a * b for a, b in zip(test, known, strict=True))
            similar.append((dot / math.hypot(*test) / math.hypot(*known), label))
        votes: dict[int, float] = {}
        for similarity, label in sorted(similar, reverse=True)[:k]:
            votes[label] = votes.get(label, 0.0) + math.exp(similarity / t)
        right += max(sorted(votes), key=lambda c: votes[c]) == true
    return right / len(truth)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (5, 0.07), (20, 0.07), (20, 0.5), (60, 0.01)])
def test_it_is_the_loop(k: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(k)
    centres = torch.randn(4, 6, generator=generator)
    labels = torch.randint(4, (60,), generator=generator)
    truth = torch.randint(4, (37,), generator=generator)
    features = (centres[labels] + 1.5 * torch.randn(60, 6, generator=generator)) * 7
    tests = (centres[truth] + 1.5 * torch.randn(37, 6, generator=generator)) / 3
    expected = loop(features.tolist(), labels.tolist(), tests.tolist(), truth.tolist(), k, temperature)
    assert 0.3 < expected < 1
    assert knn_accuracy(features, labels, tests, truth, k, temperature) == expected
    monkeypatch.setattr(nearest_neighbours, "_CHUNK", 60 * 8)  # five chunks
    assert knn_accuracy(features, labels, tests, truth, k, temperature) == expected


def test_near_neighbours_outvote_many_far_ones() -> None:
    """One near example of class 1 against two far ones of class 0: the temperature decides."""
    features = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.4, 1.0]])
    labels, test, truth = torch.tensor([1, 0, 0]), torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert knn_accuracy(features, labels, test, truth, k=3, temperature=0.07) == 1
    assert knn_accuracy(features, labels, test, truth, k=3, temperature=10.0) == 0


def test_a_small_temperature_does_not_overflow() -> None:
    features, labels = torch.eye(3), torch.tensor([0, 1, 1])
    assert knn_accuracy(features, labels, torch.eye(3), labels, k=2, temperature=1e-4) == 1


@pytest.mark.parametrize(
    ("labels", "tests", "k", "what"),
    [
        ([0, 1], 1, 3, "has 2 training examples, fewer than the 3 neighbours"),
        ([1, 1, 1], 1, 2, "have one class"),
        ([0, 1, 1], 0, 2, "has no test examples"),
    ],
)
def test_what_cannot_vote_is_refused(labels: list[int], tests: int, k: int, what: str) -> None:
    n = len(labels)
    with pytest.raises(ConfigError, match=what):
        knn_accuracy(
            torch.ones(n, 2),
            torch.tensor(labels),
            torch.ones(tests, 2),
            torch.zeros(tests, dtype=torch.int64),
            k,
        )
