"""The sum of quantized replies without masks: what a secure sum computes, and what its rounding costs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean, Weighting
from fedlens.aggregate.normalized import Normalized, TauEff
from fedlens.aggregate.secure.blind_sum import RANGES, Bits, BlindSum, Ranges
from fedlens.aggregate.secure.encoding import VECTOR
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Answers, Ask, Reply
from fedlens.core.reduction import How, Refusal, Update

Of = Annotated[
    Literal["mean", "normalized"], Field(description="the aggregate that is computed from the sum")
]
Weights = Annotated[
    Weighting, Field(description="weight of a client: its number of examples, or the same for all")
]
OfTau = Annotated[TauEff, Field(description="with of = 'normalized': as that aggregate's")]


@dataclass(frozen=True)
class Quantized(BlindSum):
    """sum_k q_k over the replies, q_k the quantized reply of a client (`SumLayout`), and `of` computed from it.

    It protects nothing, since the server gets each q_k: it is the plain computation that a secure sum must equal to
    the bit. A vector with a word beyond 2^bits is refused.

    >>> Quantized(Mean("uniform"), bits=20).weighting
    'uniform'
    """

    @property
    def discloses(self) -> tuple[str, ...]:
        """That nothing is hidden."""
        return ("Clients send quantized replies without masks, so the server can read each of them.",)

    def exchange(
        self, ask: Ask, fields: Mapping[str, How], ctx: AggregateContext
    ) -> Generator[Ask, Answers, Update | Refusal | None]:
        """Asks for the vectors, and adds them in the order of the slots; unsigned sums are exact in any order."""
        layout = self.vectors
        total, received = np.zeros(layout.words, layout.unsigned), []
        for answer in (yield replace(ask, expect=layout.schema)):
            if isinstance(answer, Reply):
                total += answer.payload[VECTOR].numpy().view(layout.unsigned)
                received.append(ask.requests[answer.id.slot])
        return self.opened(total, received, ask, ctx)


def computed(of: Of, weighting: Weighting, tau_eff: float | Literal["mean"]) -> Aggregate:
    """The aggregate of these settings. Raises `ConfigError` for a `tau_eff` that has no effect."""
    if of == "normalized":
        return Normalized(weighting, tau_eff)
    if tau_eff != "mean":
        raise ConfigError(
            "tau_eff has no effect on a mean", where="tau_eff", hint="remove it, or set of = 'normalized'"
        )
    return Mean(weighting)


def quantized(
    *,
    of: Of = "mean",
    weighting: Weights = "examples",
    tau_eff: OfTau = "mean",
    bits: Bits = 16,
    range: Ranges = RANGES,  # type: ignore[assignment]
) -> Quantized:
    """The mean, or FedNova's normalized averaging, of quantized replies."""
    return Quantized(computed(of, weighting, tau_eff), bits, range)
