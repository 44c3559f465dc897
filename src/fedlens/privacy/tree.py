"""Noise for the prefix sums of a run from a binary tree: DP-FTRL (Kairouz et al. 2021, arXiv 2103.00039).

Every node of the tree has noise of its own, and that of a prefix sum comes from the few nodes that cover it. A client
that is in one leaf pays for as many Gaussians as the tree has levels, and the noise grows with the logarithm of the
rounds and not with their root. Clients need not be drawn at random for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlens.core.types import Payload


@dataclass(frozen=True)
class NoiseTree:
    """A binary tree of noise that grows by a leaf a round, and starts anew.

    Equation, for leaf t and the nodes of its tree, each with noise g ~ N(0, s^2 I) of its own:

        N_0 = g                                                 of a leaf
        N_j = w_j g + (1 - w_j) (N_left + N_right),   w_j = 1 / (2 (1 - 2^-(j + 1)))
        n_t = sum of N_j over the set bits j of t

    N_j is the noise in Honaker's estimate from below of a sum over 2^j leaves; its variance is w_j s^2. Without Honaker
    N_j = g, and the variance of n_t is popcount(t) s^2.

    Attributes:
        deviation: s.
        restart: a new tree starts after this number of rounds.
        honaker: whether the estimate of a node uses the nodes below.

    >>> import torch
    >>> tree, kept = NoiseTree(1.0, restart=4), {}
    >>> for round in range(1, 6):
    ...     kept, change = tree.grown(kept, round, 1, torch.ones)
    ...     print(kept["first"], kept["leaf"], len(kept["nodes"]), f"{change.item():.3f}")
    1 1 1 1.000
    1 2 1 0.333
    1 3 2 1.000
    1 4 1 -0.619
    5 1 1 1.000
    """

    deviation: float
    restart: int
    honaker: bool = True

    def grown(
        self, kept: Payload, round: int, n: int, normal: Callable[[int], Tensor]
    ) -> tuple[dict[str, Any], Tensor]:
        """The tree with the leaf of this round, and n_t - n_(t-1), float64 [n]; in a new tree it is n_t.

        A round that has released something before, as one that is repeated after a kill, starts a new tree: two sums
        under the same noise would tell their difference.

        Args:
            kept: the tree that this returned last; empty for none.
            normal: draws so many numbers of mean 0 and deviation 1.
        """
        grows = bool(kept) and kept["round"] < round < kept["first"] + self.restart
        if not grows or (kept["deviation"], len(kept["nodes"][0])) != (self.deviation, n):
            kept = {"first": round, "leaf": 0, "nodes": []}
        nodes, level = list(kept["nodes"]), 0
        node = normal(n) * self.deviation
        before = node * 0
        while kept["leaf"] >> level & 1:
            level += 1
            weight = 1 / (2 * (1 - 2.0 ** -(level + 1))) if self.honaker else 1.0
            left = nodes.pop()
            before += left
            node = (left + node) * (1 - weight) + normal(n) * (weight * self.deviation)
        about = {
            "first": kept["first"],
            "round": round,
            "leaf": kept["leaf"] + 1,
            "deviation": self.deviation,
        }
        return {**about, "nodes": [*nodes, node]}, node - before
