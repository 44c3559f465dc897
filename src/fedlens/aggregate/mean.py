"""The weighted mean of the replies, folded where the work ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from torch import Tensor

from fedlens.core.folding import fold
from fedlens.core.protocol import Answer, Reduce, Reply
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


_FIELDS = Reduce({"update": "sum", "buffers": "sum", "counters": "max"})


@dataclass(frozen=True)
class Mean:
    """sum_k n_k Delta_k / sum_k n_k over the replies that came (hsu2019 section 4.2); n_k = 1 if uniform.

    Running statistics get the same mean, counters the largest value. The additions form a tree that depends on
    the size of the cohort alone, so that every engine gets the same bits.

    >>> import torch
    >>> from fedlens.core.protocol import Id
    >>> def reply(slot, weight, value):
    ...     trees = {"update": {"w": torch.tensor([value])}, "buffers": {}, "counters": {}}
    ...     return Reply(Id(1, 0, slot), slot, {**trees, "weight": weight})
    >>> Mean().fold([reply(0, 1.0, 4.0), reply(1, 3.0, 8.0)]).update
    {'w': tensor([7.])}
    """

    weighting: Weighting = "examples"

    def reduce(self, cohort: int) -> Reduce | None:
        """Every reply by itself below 64 clients; then blocks of two, from 96 on of three, and so on.

        So there are always enough blocks for 32 workers, and a thousand small replies do not cross one by one.
        """
        return replace(_FIELDS, block=cohort // 32) if cohort >= 64 else None

    def fold(self, answers: Iterable[Answer]) -> Update | None:
        """Adds replies or folded blocks up and divides by the sum of the weights."""
        total: dict[str, Any] = {}
        for answer in answers:
            if answer.folded is not None:
                fold(total, _FIELDS, answer.folded, folded=True)
            elif isinstance(answer, Reply) and "update" in answer.payload:
                fold(total, _FIELDS, answer.payload)
        if not total:
            return None
        weight = total["weight"]
        return Update(
            {name: value / weight for name, value in total["update"].items()},
            {name: value / weight for name, value in total["buffers"].items()},
            total["counters"],
        )


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
