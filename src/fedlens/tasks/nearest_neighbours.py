"""The accuracy of a weighted vote of nearest neighbours, which measures features without training a classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.base.errors import ConfigError

_CHUNK = 2**24  # similarities that are in memory at once


def knn_accuracy(
    features: Tensor,
    labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """The share of test examples that a weighted vote of their k nearest neighbours classifies correctly.

    With the cosine similarity s_i to training example i, and N the k examples of the largest similarity, class c has
    the votes `sum_{i in N, y_i = c} exp(s_i / temperature)` (Wu et al. 2018, arXiv 1805.01978, section 3.4). Of equal
    votes, the class with the lower number wins.

    Args:
        features: float [n, d], of the training examples.
        labels: int64 [n], from 0 on.
        test_features: float [m, d].
        test_labels: int64 [m].
        k: the number of neighbours.
        temperature: smaller values give near neighbours more weight.

    Raises `ConfigError` if there are fewer than k training examples, no test example, or a single class.

    >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> knn_accuracy(features, torch.tensor([0, 0, 1]), torch.tensor([[2.0, 0.1]]), torch.tensor([0]), k=2)
    1.0
    """
    check_neighbours(labels, len(test_labels), k)
    classes = int(max(labels.max(), test_labels.max())) + 1
    known = F.normalize(features.float(), dim=1)
    chunk = max(1, _CHUNK // len(known))
    right = 0
    for part, truth in zip(torch.split(test_features, chunk), torch.split(test_labels, chunk), strict=True):
        nearest = (F.normalize(part.float(), dim=1) @ known.t()).topk(k, dim=1)
        # At most 1, so that none is infinite.
        weights = torch.exp((nearest.values.double() - 1) / temperature)
        votes = weights.new_zeros(len(part), classes).scatter_add_(1, labels[nearest.indices], weights)
        right += int((votes.argmax(1) == truth).sum())
    return right / len(test_labels)


def check_neighbours(labels: Tensor, tested: int, k: int, name: str = "the labelled set") -> None:
    """Raises `ConfigError` if k of these examples cannot classify `tested` others."""
    if len(labels) < k:
        raise ConfigError(
            f"{name} has {len(labels):,} training examples, fewer than the {k} neighbours", where="k",
            hint=f"set it to at most {len(labels)}",
        )  # fmt: skip
    if tested == 0:
        raise ConfigError(f"{name} has no test examples", where="dataset", hint="choose another dataset")
    if bool((labels == labels[0]).all()):
        raise ConfigError(
            f"the training examples of {name} have one class, so every vote is right",
            where="dataset",
            hint="choose a dataset with at least two classes",
        )
