"""Aggregates of one's own, each defined by one function: two robust ones, and one with a memory."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from fedlens.aggregates import ByColumn, ByWeights


class Median(ByColumn):
    """The median of each value over the replies, so that a few broken clients change little."""

    def column(self, block):
        """The median of each column of [n, b]; the lower one of the middle two if n is even."""
        return block.median(dim=0).values


class GeometricMedian(ByWeights):
    """The point with the least sum of distances to the updates. Pillutla et al. 2022 (arXiv 1912.13445)."""

    def weights(self, rows):
        """Weiszfeld's iteration: a reply far from the current point gets a small weight."""
        weights = rows.weight / rows.weight.sum()
        for _ in range(10):
            weights = rows.weight / rows.distances(weights).clamp(min=1e-6)
            weights = weights / weights.sum()
        return weights


@dataclass(frozen=True, kw_only=True)
class CenteredClipping(ByWeights):
    """v <- v + sum_k p_k (Delta_k - v) min(1, radius / ||Delta_k - v||). Karimireddy et al. 2021 (arXiv 2012.10333)."""

    radius: Annotated[float, Field(gt=0, description="longest distance of an update from the last one")] = 1.0

    def init(self, weights, federation):
        """v = 0."""
        return {"v": {name: torch.zeros_like(value) for name, value in weights.items()}}

    def weights(self, rows):
        """p_k min(1, radius / ||Delta_k - v||)."""
        share = rows.weight / rows.weight.sum()
        return share * (self.radius / rows.distances_to(rows.state["v"])).clamp(max=1)

    def finish(self, rows, update):
        """Adds the rest of v, and keeps the sum as the new v."""
        rest = 1 - rows.chosen.sum().item()
        v = {name: delta + rest * rows.state["v"][name] for name, delta in update.update.items()}
        return replace(update, update=v, state={"v": v})
