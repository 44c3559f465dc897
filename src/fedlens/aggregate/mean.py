"""The weighted mean of the replies, folded where the work ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedlens.core.protocol import Answer, Payload, Reduce
from fedlens.core.registry import Entry, Registry

Weighting = Literal["examples", "uniform"]


@dataclass(frozen=True)
class Update:
    """What a round's replies come to: the mean Delta of the trainable weights, and the buffers as they should be."""

    update: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    counters: Mapping[str, Tensor]
    more: Mapping[str, Any] = field(default_factory=dict)


class Aggregate(Protocol):
    """How replies become one update."""

    @property
    def weighting(self) -> Weighting:
        """What a client's `weight` is."""
        ...

    def reduce(self, cohort: int) -> Reduce | None:
        """How to fold where the work runs, for a cohort of this size; None asks for every reply."""
        ...

    def fold(self, answers: Iterable[Answer]) -> Update | None:
        """Folds a round's answers; None where no reply was good."""
        ...


@dataclass(frozen=True)
class Mean:
    """sum_k n_k Delta_k / sum_k n_k over the replies that came (hsu2019 section 4.2); n_k = 1 if uniform.

    Running statistics get the same mean, counters the largest value. The additions form a tree that depends on
    the size of the cohort alone, so that every engine gets the same bits.
    """

    weighting: Weighting = "examples"

    def reduce(self, cohort: int) -> Reduce:
        """Blocks of one up to 63 clients, of two up to 95, and so on: enough blocks to keep 16 workers busy."""
        return Reduce({"update": "sum", "buffers": "sum", "counters": "max"}, block=max(1, cohort // 32))

    def fold(self, answers: Iterable[Answer]) -> Update | None:
        """Adds the folded blocks up and divides by the sum of the weights."""
        total: dict[str, Any] | None = None
        for answer in answers:
            if answer.folded is not None:
                total = _add(total, answer.folded)
        if total is None:
            return None
        weight = total["weight"]
        return Update(
            {name: value / weight for name, value in total["update"].items()},
            {name: value / weight for name, value in total["buffers"].items()},
            total["counters"],
        )


def _add(total: dict[str, Any] | None, folded: Payload) -> dict[str, Any]:
    if total is None:
        # Copied: what came may look at a worker's memory, which is wanted back.
        trees = {
            name: {leaf: t.clone() for leaf, t in folded[name].items()}
            for name in ("update", "buffers", "counters")
        }
        return {**trees, "weight": folded["weight"]}
    for name in ("update", "buffers"):
        if total[name]:
            torch._foreach_add_(list(total[name].values()), [folded[name][leaf] for leaf in total[name]])
    total["counters"] = {
        leaf: torch.maximum(t, folded["counters"][leaf]) for leaf, t in total["counters"].items()
    }
    total["weight"] += folded["weight"]
    return total


def mean(
    *,
    weighting: Annotated[
        Weighting, Field(description="weight of a client: its examples, or the same for all")
    ] = "examples",
) -> Mean:
    """The weighted mean of the clients' updates."""
    return Mean(weighting)


AGGREGATES = Registry(
    "aggregate", {"mean": Entry("fedlens.aggregate.mean:mean", "weighted mean, by examples or uniform")}
)
