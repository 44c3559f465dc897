"""An aggregate of two exchanges: masked updates, then the masks. Their difference is the mean of the updates."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.aggregate.mean import AggregateContext, Mean
from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.algorithms.client_sampling import Uniform
from fedlens.core.protocol import Answers, Ask, Client, Op, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.core.reduction import How, Refusal, Update
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.local.training import Train
from tests.identity.identity_kit import close, course, parts, world

LOCAL = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 4}


def mask_of(client: Client, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mask of the client's own for each leaf, the same whenever it is asked for."""
    draw = torch.Generator().manual_seed(int.from_bytes(client.secrets.token("mask", 7), "big"))
    return {name: torch.randn(w.shape, generator=draw, dtype=w.dtype) for name, w in tree.items()}


@dataclass(frozen=True)
class TrainMasked:
    """Local training whose update has the client's mask on it."""

    train: Train

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        outcome = self.train(payload, client, rng)
        update = outcome.payload["update"]
        masked = {name: value + mask_of(client, update)[name] for name, value in update.items()}
        return outcome._replace(payload={**outcome.payload, "update": masked}, donated=frozenset())


@dataclass(frozen=True)
class SendMask:
    """What the client put on its update, weighted as the update was."""

    train: Train

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        masks = mask_of(client, payload["model"])
        return Outcome({"update": masks, "buffers": {}, "counters": {}, "weight": float(len(client.data))})


@dataclass(frozen=True)
class Masked(Mean):
    """The weighted mean of masked updates, less the weighted mean of the masks."""

    @property
    def ops(self) -> Mapping[str, Callable[[Any], Op]]:
        return {"train-masked": TrainMasked, "mask": SendMask}

    def exchange(
        self, ask: Ask, fields: Mapping[str, How], ctx: AggregateContext
    ) -> Generator[Ask, Answers, Update | Refusal | None]:
        masked = yield from super().exchange(replace(ask, op="train-masked"), fields, ctx)
        masks = yield from super().exchange(
            Ask("mask", ask.requests, {"model": ask.shared["model"]}), {}, ctx
        )
        if not isinstance(masked, Update) or not isinstance(masks, Update):
            return None
        return replace(masked, update={n: v - masks.update[n] for n, v in masked.update.items()})


def algorithms(there: Any) -> tuple[Averaging, Averaging]:
    given: Parts = parts(there, LOCAL, select=Uniform(3))
    return averaging(given), averaging(given, aggregate=Masked())


@pytest.mark.parametrize("engine", [inline, lambda: processes(workers=2)], ids=["inline", "processes"])
def test_two_exchanges_give_the_mean_of_one(engine: Callable[[], Any]) -> None:
    there = world()
    plain, masked = algorithms(there)
    wanted, run = course(plain, there), course(masked, there, engine=engine())
    assert [step.cohort for step in run.steps] == [step.cohort for step in wanted.steps]  # one row a client
    close(run.final, wanted.final, rtol=1e-12, atol=1e-12)


def test_the_masks_are_in_the_answers_of_the_first_exchange() -> None:
    there = world()
    plain, masked = algorithms(there)
    unmasked = course(replace(masked, aggregate=OneExchange()), there, rounds=1).final
    wanted = course(plain, there, rounds=1).final
    assert all((unmasked[name] - wanted[name]).abs().max() > 0.01 for name in wanted)


@dataclass(frozen=True)
class OneExchange(Masked):
    """Without the second exchange."""

    def exchange(
        self, ask: Ask, fields: Mapping[str, How], ctx: AggregateContext
    ) -> Generator[Ask, Answers, Update | Refusal | None]:
        return Mean().exchange(replace(ask, op="train-masked"), fields, ctx)
