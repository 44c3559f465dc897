"""Optimal convex aggregation: Chen et al. 2022 (arXiv 2206.11488), section 4.4 and appendix B.2."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean, Weighting, reweighted
from fedlens.base.errors import RunFailed
from fedlens.core.convex_combination import ModelMatrix
from fedlens.core.modules import loadable
from fedlens.core.protocol import (
    Answer,
    Answers,
    Ask,
    Client,
    Failure,
    ModelSpec,
    Op,
    Outcome,
    Payload,
    Reply,
    Request,
)
from fedlens.core.random import Rng
from fedlens.core.reduction import How, Update
from fedlens.core.schema import Bound, Schema, TensorField
from fedlens.core.tree import Tree
from fedlens.tasks.optimal_weights import SEARCH_RATE, optimal_weights
from fedlens.tasks.task import Task

_OP = "optimal-weights"
_PARTS = ("update", "buffers", "counters")
_METRICS = {"aggregation_gain": Bound(), "aggregation_distance": Bound(0)}


@dataclass(frozen=True)
class FindOptimalWeights:
    """The operation that finds the weights of the clients' models on data of the server.

    Payload: `model`, the tree that the clients started from; and of each client, in one list, `update`, `buffers`,
    `counters` and `weight`, as training sent them. It sends back `weights`, float64 [K], and measures by how much they
    score better than the plain average (`aggregation_gain`), and how far from it they are (`aggregation_distance`).
    """

    model: ModelSpec
    task: Task
    lr: float
    epochs: int
    batch_size: int
    starts: int

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Searches from each start, and takes the best candidate."""
        learner, base = loadable(self.model, client), payload["model"]
        learner.load(base)
        trees = [
            {**{name: base[name] - delta for name, delta in update.items()}, **buffers, **counters}
            for update, buffers, counters in zip(*(payload[part] for part in _PARTS), strict=True)
        ]
        found = optimal_weights(
            self.task,
            learner,
            client.data,
            ModelMatrix(trees),
            torch.tensor(payload["weight"], dtype=torch.float64),
            lr=self.lr,
            rng=rng,
            epochs=self.epochs,
            batch_size=self.batch_size,
            starts=self.starts,
        )
        numbers = {"aggregation_gain": found.gain, "aggregation_distance": found.distance}
        return Outcome(
            {"weights": found.weights},
            metrics={name: value for name, value in numbers.items() if math.isfinite(value)},
        )


@dataclass(frozen=True)
class OptimalConvex(Aggregate):
    """sum_k w_k Delta_k with the weights w on the simplex for which `sum_k w_k theta_k` scores best on server data.

    Running statistics get the same weights, counters the largest value. The search is that of
    `fedlens.tasks.optimal_weights.optimal_weights`; where the plain average scores best, its bits are those of `Mean`.
    All replies of a round are kept in memory, and one worker gets them all.

    Args:
        on: the server's data that the weights are chosen on. With "test", as in the paper, the test metrics of the
            run are optimistic, since the model was chosen by them.
        weighting: of the plain average, one of the candidates.
        lr, epochs, batch_size, starts: of the search.

    >>> OptimalConvex("test").server_data
    '@test'
    """

    on: Literal["validation", "test"] = "validation"
    weighting: Weighting = "examples"
    lr: float = SEARCH_RATE
    epochs: int = 20
    batch_size: int = 32
    starts: int = 3

    @property
    def server_data(self) -> str:
        """The data that the weights are chosen on."""
        return f"@{self.on}"

    @property
    def discloses(self) -> tuple[str, ...]:
        """That the server holds labelled data, and what that means for the test metrics."""
        start = f"The server chooses the weights of the clients' models on labelled {self.on} data of its own"
        end = ", so the test metrics of this run are optimistic." if self.on == "test" else "."
        return (start + end,)

    @property
    def ops(self) -> Mapping[str, Callable[[Any], Op]]:
        """The search for the weights."""
        return {
            _OP: lambda train: FindOptimalWeights(
                train.model, train.task, self.lr, self.epochs, self.batch_size, self.starts
            )
        }

    def aggregate(
        self, answers: Iterable[Answer], fields: Mapping[str, How], ctx: AggregateContext
    ) -> Update | None:
        """The plain mean, weighted by the `weight` of each reply."""
        return Mean(self.weighting).aggregate(answers, fields)

    def exchange(
        self, ask: Ask, fields: Mapping[str, How], ctx: AggregateContext
    ) -> Generator[Ask, Answers, Update | None]:
        """Asks for training, then for the weights on the server's data.

        Raises `RunFailed` where the search itself fails.
        """
        replies = [answer for answer in (yield ask) if isinstance(answer, Reply)]
        if len(replies) > 1:
            answers = yield self._search(ask.shared["model"], replies)
            replies = _weighted(replies, self._found(answers))
        return self.aggregate(replies, fields, ctx)

    def _search(self, model: Tree, replies: Sequence[Reply]) -> Ask:
        # Replies may be rows of stacked trees, which are sent as trees of their own.
        shared: dict[str, Any] = {part: [dict(r.payload[part]) for r in replies] for part in _PARTS}
        shared |= {"model": model, "weight": [float(reply.payload["weight"]) for reply in replies]}
        valid = TensorField((len(replies),), torch.float64, low=0.0, high=1.0)
        expect = Schema({"weights": valid}, metrics=_METRICS)
        return Ask(_OP, [Request(self.server_data)], shared, expect)

    def _found(self, answers: Answers) -> Tensor:
        (answer,) = answers
        if isinstance(answer, Failure):
            raise RunFailed(
                f"finding the optimal weights on the {self.on} data failed: {answer.reason}",
                hint="set aggregate.name = 'mean' to run without them",
            )
        weights: Tensor = answer.payload["weights"]
        return weights


def _weighted(replies: Sequence[Reply], weights: Tensor) -> list[Reply]:
    """The replies with these weights, whose sum stays that of their own; unchanged if the weights are the average's."""
    own = torch.tensor([float(reply.payload["weight"]) for reply in replies], dtype=torch.float64)
    if torch.equal(weights, own / own.sum()):
        return list(replies)
    return reweighted(replies, (weights * own.sum()).tolist())


def optimal_convex(
    *,
    on: Annotated[
        Literal["validation", "test"],
        Field(
            description="the server's labelled data that the weights are chosen on; with 'test', as in Chen et al. "
            "2022, the test metrics are optimistic"
        ),
    ] = "validation",
    weighting: Annotated[
        Weighting,
        Field(description="weights of the plain average, which is a candidate: by examples, or the same"),
    ] = "examples",
    lr: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="learning rate of the search, in softmax's inputs"),
    ] = SEARCH_RATE,
    epochs: Annotated[int, Field(ge=1, description="passes over the data from each start")] = 20,
    batch_size: Annotated[int, Field(ge=1, description="examples in a step of the search")] = 32,
    starts: Annotated[
        int, Field(ge=1, description="starts of the search: the center of the simplex, and random points")
    ] = 3,
) -> OptimalConvex:
    """The convex combination of the clients' models that scores best on data of the server."""
    return OptimalConvex(on, weighting, lr, epochs, batch_size, starts)
