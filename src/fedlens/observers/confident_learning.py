"""Confident learning: which labels a model contradicts confidently (Northcutt et al. 2021, arXiv 1911.00068).

The model must not have trained on the examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Contradictions:
    """What a model says against the label of each of n examples.

    Attributes:
        classes: int64 [n], the class that it suggests instead; the label itself where it does not contradict.
        margins: float64 [n], the probability of that class less the probability of the label; 0 without contradiction.
    """

    classes: NDArray[np.int64]
    margins: NDArray[np.float64]


def thresholds(
    labels: NDArray[np.int64], confidence: NDArray[np.floating], classes: int
) -> NDArray[np.float64]:
    """float64 [classes]: the mean probability of class j over the examples labelled j, Eq. 2; inf without examples.

    Args:
        labels: int64 [n].
        confidence: [n], the probability of each example's label.
        classes: the number of classes.

    >>> thresholds(np.array([0, 0, 1]), np.array([0.5, 0.75, 0.25]), 3).tolist()
    [0.625, 0.25, inf]
    """
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, confidence, minlength=classes)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)


def contradictions(
    labels: NDArray[np.int64],
    confidence: NDArray[np.floating],
    top: NDArray[np.integer],
    scores: NDArray[np.floating],
    classes: int,
) -> Contradictions:
    """The examples off the diagonal of the confident joint, each with its normalized margin.

    An example with label i counts for class j if p(j) >= t_j and, of all classes l with p(l) >= t_l, p(j) is the
    largest (Eq. 1). It is off the diagonal if j is not i; its margin is p(j) - p(i) (section 3.2, prune by noise rate).
    Of equal probabilities the first in `top` counts. If only the k most probable classes are given, an example of which
    none of them reaches its threshold is not contradicted: its other classes have probabilities below 1 / (k + 1).

    Args:
        labels: int64 [n].
        confidence: [n], the probability of each label.
        top, scores: [n, k], the most probable classes, and their probabilities in falling order.
        classes: the number of classes.

    >>> p = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]])
    >>> labels = np.array([0, 0, 1, 1])
    >>> order = np.argsort(-p, axis=1)
    >>> found = contradictions(labels, p[range(4), labels], order, np.take_along_axis(p, order, 1), 2)
    >>> found.classes.tolist(), found.margins.round(3).tolist()  # t = (0.8, 0.45)
    ([0, 0, 1, 0], [0.0, 0.0, 0.0, 0.8])
    """
    reached = scores >= thresholds(labels, confidence, classes)[top]
    first = reached.argmax(axis=1)
    rows = np.arange(len(labels))
    counted = np.where(reached.any(axis=1), top[rows, first], labels).astype(np.int64)
    margins = np.where(counted == labels, 0.0, scores[rows, first].astype(np.float64) - confidence)
    return Contradictions(counted, margins)
