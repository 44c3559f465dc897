"""Fairness: clients with a larger loss count more. After q-FFL, Li et al. 2020 (arXiv 1905.10497)."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedlens.aggregates import Aggregate, Mean, Reply


def loss_weighted(
    *, q: Annotated[float, Field(ge=0, description="0 is FedAvg; larger is fairer")] = 1.0
) -> Aggregate:
    """sum_k n_k F_k^q Delta_k / sum_k n_k F_k^q, where F_k is the client's mean loss in local training."""
    return LossWeighted(q)


@dataclass(frozen=True)
class LossWeighted(Aggregate):
    """The weighted mean with other weights."""

    q: float

    def aggregate(self, answers, fields, ctx):
        """The update; None without a good reply."""
        return Mean().aggregate(map(self.weighted, answers), fields)

    def weighted(self, answer):
        """The answer with n_k F_k^q for its weight."""
        if isinstance(answer, Reply):
            loss = answer.metrics["loss"] / answer.metrics["examples"]
            answer.payload = {**answer.payload, "weight": answer.payload["weight"] * loss**self.q}
        return answer
