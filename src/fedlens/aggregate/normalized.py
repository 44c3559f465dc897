"""Normalized averaging: Wang et al. 2020 (arXiv 2007.07481), FedNova."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean, Weighting
from fedlens.base.registry import Feeds
from fedlens.core.protocol import Answer, Reduce
from fedlens.core.reduction import How, Update
from fedlens.core.tree import scale

TauEff = Annotated[
    Literal["mean"] | Annotated[float, Field(gt=0, allow_inf_nan=False)],
    Field(
        description="number of steps the server takes along the mean direction: 'mean' (the clients' "
        "weighted mean) or a number"
    ),
    Feeds("aggregate"),
]


@dataclass(frozen=True)
class Normalized(Aggregate):
    """tau_eff sum_k p_k Delta_k / ||a_k||_1, with tau_eff = sum_k p_k ||a_k||_1 unless it is a number.

    p_k = n_k / n (or 1 / |S|) over the clients that replied: with the weights of the whole population both sums fall
    short of 1 in a round of few clients. Clients divide their update by ||a_k||_1 themselves, and send that as `tau`.
    Running statistics and counters are aggregated as in the plain mean.

    >>> import torch
    >>> from fedlens.core.protocol import Id, Reply
    >>> def reply(slot, weight, direction, tau):
    ...     trees = {"update": {"w": torch.tensor([direction])}, "buffers": {}, "counters": {}}
    ...     return Reply(Id(1, 0, slot), slot, {**trees, "weight": weight, "tau": tau})
    >>> fields = {"tau": "mean"}
    >>> Normalized().aggregate([reply(0, 1.0, 4.0, 2.0), reply(1, 3.0, 8.0, 6.0)], fields).update  # 7 times 5
    {'w': tensor([35.])}
    """

    follows_device: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    weighting: Weighting = "examples"
    tau_eff: Literal["mean"] | float = "mean"

    @property
    def normalized(self) -> bool:
        """Yes."""
        return True

    def reduce(self, cohort: int, fields: Mapping[str, How]) -> Reduce | None:
        """As the plain mean does."""
        return Mean(self.weighting).reduce(cohort, fields)

    def aggregate(
        self, answers: Iterable[Answer], fields: Mapping[str, How], ctx: AggregateContext | None = None
    ) -> Update | None:
        """The mean direction times tau_eff. `fields` has to have `tau`, whose mean is wanted."""
        update = Mean(self.weighting).aggregate(answers, fields)
        return None if update is None else self.summed(update)

    def summed(self, update: Update) -> Update:
        """The mean direction times tau_eff."""
        steps = update.more["tau"] if self.tau_eff == "mean" else self.tau_eff
        return replace(update, update=scale(update.update, steps))


def normalized(
    *,
    weighting: Annotated[
        Weighting, Field(description="weight of a client: its number of examples, or the same for all")
    ] = "examples",
    tau_eff: TauEff = "mean",
) -> Normalized:
    """FedNova's normalized averaging of the clients' updates."""
    return Normalized(weighting, tau_eff)
