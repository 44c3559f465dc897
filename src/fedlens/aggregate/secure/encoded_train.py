"""Local training whose reply is one vector of words, as a blind sum needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedlens.aggregate.secure.encoding import VECTOR, SumLayout
from fedlens.core.protocol import BatchedOp, Call, Client, Obstacle, Outcome, Payload
from fedlens.core.random import Rng


@dataclass(frozen=True)
class EncodedTrain:
    """An operation of local training that sends its reply as one vector, `SumLayout.encode`, and nothing else.

    It sends back `vector`, int32 or int64 [words], and no metrics: the loss is in the vector. The client's state is
    that of the training. Clients that may train together still do.

    A client whose reply holds NaN, an infinity or a value beyond its range fails with the reason.
    """

    train: BatchedOp
    layout: SumLayout

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Trains at one client. Raises `ValueError` if its reply cannot be encoded."""
        return self._encoded(self.train(payload, client, rng))

    def together(self, calls: Sequence[Call]) -> Sequence[Outcome | BaseException]:
        """Trains several clients at once, and encodes each reply."""
        return [self._encoded_or_failed(outcome) for outcome in self.train.together(calls)]

    def obstacle(self) -> Obstacle | None:
        """That of the training."""
        return self.train.obstacle()

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The approximate bytes of each client: those of the training, and its vector."""
        return self.train.footprint(device, largest, data) + self.layout.words * self.layout.dtype.itemsize

    def _encoded_or_failed(self, outcome: Outcome | BaseException) -> Outcome | BaseException:
        try:
            return outcome if isinstance(outcome, BaseException) else self._encoded(outcome)
        except ValueError as error:
            return error

    def _encoded(self, outcome: Outcome) -> Outcome:
        words = self.layout.encode(outcome.payload, outcome.metrics)
        vector = torch.from_numpy(words).view(self.layout.dtype)
        return Outcome({VECTOR: vector}, outcome.state, donated=frozenset({VECTOR}))
