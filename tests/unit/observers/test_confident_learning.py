"""Confident learning: a by-hand example of the paper's equations, and their plain form over all classes."""

from __future__ import annotations

import numpy as np
import pytest

from fedlens.observers.held_out_predictions import contradictions, thresholds


def ranked(p: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-p, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(p, order, 1)


def test_an_example_by_hand() -> None:
    # Cat, dog and fox. Thresholds (Eq. 2): cat (0.9 + 0.6 + 0.0) / 3 = 0.5, dog (0.7 + 0.5) / 2 = 0.6, fox 0.3.
    labels = np.array([0, 0, 0, 1, 1, 2])
    p = np.array(
        [
            [0.90, 0.10, 0.00],  # cat, over 0.5: on the diagonal
            [0.60, 0.40, 0.00],  # cat
            [0.00, 0.65, 0.35],  # dog 0.65 and fox 0.35 reach theirs, dog is larger: off the diagonal
            [0.20, 0.70, 0.10],  # dog
            [0.10, 0.50, 0.40],  # dog is largest and does not reach 0.6; fox does
            [0.45, 0.25, 0.30],  # cat is largest and does not reach 0.5; its own label does
        ]
    )
    confidence = p[range(6), labels]
    assert thresholds(labels, confidence, 3) == pytest.approx([0.5, 0.6, 0.3])
    found = contradictions(labels, confidence, *ranked(p, 3), 3)
    assert found.classes.tolist() == [0, 0, 1, 1, 2, 2]
    assert found.margins == pytest.approx([0, 0, 0.65, 0, -0.1, 0])


def equations(labels: np.ndarray, p: np.ndarray) -> list[int]:
    """Eq. 1 and 2, example by example."""
    classes = range(p.shape[1])
    t = {j: p[labels == j, j].mean() for j in classes if (labels == j).any()}
    counted = []
    for x, label in enumerate(labels):
        reached = [j for j in t if p[x, j] >= t[j]]
        counted.append(max(reached, key=lambda j: p[x, j]) if reached else int(label))
    return counted


def test_it_is_the_equations_for_random_probabilities_and_classes_without_examples() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(7, 0.5), 200)
    labels = np.where(rng.random(200) < 0.7, p.argmax(1), rng.integers(0, 6, 200))
    labels[labels == 6] = 0  # nothing has the last class
    confidence = p[range(200), labels]
    right = equations(labels, p)
    whole = contradictions(labels, confidence, *ranked(p, 7), 7)
    assert whole.classes.tolist() == right
    assert 0 < (whole.classes != labels).sum() < 150
    # Of the five most probable classes, it misses those only in which a class below them reaches its threshold.
    top, scores = ranked(p, 5)
    five = contradictions(labels, confidence, top, scores, 7)
    missed = five.classes != whole.classes
    assert all(right[x] not in top[x] and p[x, right[x]] < 1 / 6 for x in np.flatnonzero(missed))
