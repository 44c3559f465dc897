"""How much of an image is left in what a client sends of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.local.halves import Half

FEWEST, MOST = 4, 128  # examples of a client that are compared


@dataclass(frozen=True)
class Leakage:
    """The distance correlation between a client's images and their activations, over its first 128 examples.

    Payload: `model`, the leaves of the half. The reply has `correlation`.
    """

    half: Half

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Compares images without augmentation with what evaluation mode gives."""
        learner = self.half.learner(client)
        learner.load(payload["model"])
        learner.module.eval()
        most = min(len(client.data), MOST)
        inputs, _ = next(iter(client.data.stretches(0, most, most)))
        with torch.no_grad():
            activations = learner.module(inputs)
        return Outcome({"correlation": distance_correlation(inputs, activations)})


def distance_correlation(x: Tensor, y: Tensor) -> float:
    """The distance correlation of two samples, from 0 (independent) to 1 (one is the other, moved or turned).

    The root of the bias-corrected statistic of Székely and Rizzo 2013 ("The distance correlation t-test of independence
    in high dimension"); a negative one counts as 0. The plain statistic goes to 1 with the number of dimensions.

    Args:
        x: float [N, ...], N >= 4.
        y: float [N, ...], of the same examples.

    >>> x = torch.arange(12.0).reshape(6, 2) ** 2
    >>> round(distance_correlation(x, 3 - 2 * x), 6)
    1.0
    """
    flat = [v.flatten(1).double() for v in (x, y)]
    a, b = (_centred(torch.cdist(v, v)) for v in flat)
    variances = (a * a).sum() * (b * b).sum()
    return float(((a * b).sum() / variances.sqrt()).clamp(0, 1).sqrt()) if variances > 0 else 0.0


def _centred(distances: Tensor) -> Tensor:
    """Distances [N, N] less the means of their rows and columns (U-centering); 0 on the diagonal."""
    n = len(distances)
    rows = distances.sum(1) / (n - 2)
    centred = distances - rows[:, None] - rows + distances.sum() / ((n - 1) * (n - 2))
    return centred.fill_diagonal_(0.0)
