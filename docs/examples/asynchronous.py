"""Buffered asynchronous averaging. Nguyen et al. 2022 (arXiv 2106.06639), FedBuff.

The order of arrival is that of the machine: run it with `engine.name = "processes"` or `"ray"`. Such a run is not
repeated bit for bit. A resumed run starts anew with `buffer` clients at work.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedlens.parts import AlgorithmBase, Ask, Averaging, Parts, Reply, Request, averaging

Count = Annotated[int, Field(ge=1)]


def asynchronous(parts: Parts, *, buffer: Count = 5, running: Count = 10) -> AlgorithmBase:
    """The server steps after `buffer` replies, of `running` clients at work; a late reply counts less."""
    return Asynchronous(averaging(parts), buffer, running)


@dataclass(frozen=True)
class Asynchronous(AlgorithmBase):
    """A round ends with the first `buffer` replies; the others arrive in later rounds."""

    base: Averaging
    buffer: int
    running: int

    @property
    def ops(self):
        """Training and evaluation, as in FedAvg."""
        return self.base.ops

    def init(self, model, federation):
        """The initial model."""
        return self.base.init(model, federation)

    def round(self, state, ctx):
        """w <- w - mean_k Delta_k / sqrt(1 + age_k)."""
        asked = self.running if ctx.round == 1 else self.buffer
        clients = ctx.rng.numpy("select").choice(ctx.federation.eligible, asked, replace=False)
        parts, model = self.base.parts, dict(state["model"])
        shared = {"model": parts.model.sent(state["model"]), **parts.local.shared_rate(ctx.round, ctx.rounds)}
        expect = self.base.train.expect(parts.spec, most=ctx.federation.largest)
        requests, taken = [Request(int(client)) for client in clients], 0
        for answer in (yield Ask("train", requests, shared, expect=expect, order="arrival")):
            if isinstance(answer, Reply):
                taken += 1
                share = (1 + ctx.round - answer.id.round) ** -0.5 / self.buffer
                for name, update in answer.payload["update"].items():
                    model[name] = model[name] - share * update
                model |= {**answer.payload["buffers"], **answer.payload["counters"]}
            if taken == self.buffer:
                break
        return {**state, "model": model}

    def evaluate(self, state, ctx):
        """On the test data, while clients are at work."""
        return self.base.evaluate(state, ctx)

    def model(self, state):
        """The global model."""
        return self.base.model(state)
