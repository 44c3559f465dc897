"""Bounds on the norms of replies, so that a finite but huge reply is rejected.

A reply with entries of 3e38 is finite, and one such reply destroys the model. A reply is rejected if the Euclidean norm
of one of its trees is more than `NORM_LIMIT` (10^4) times the typical norm of that tree. Each tree has a bound of its
own, by operation and field, because control variates, gradients and updates have different scales.

The typical norm is the median over the replies accepted so far, once there are `FIRST` (20). It never decreases during
a run: updates are small at the end of training, but a client that is asked for the first time may still send one as
large as those at the beginning. Norms of 0 are not counted; they belong to clients that did not move. The bound of an
ask depends only on the replies to earlier asks, so it does not depend on the engine.

The bound rejects a few broken clients. If it rejects every reply of a round to an operation, the scale of the replies
has changed, for example because a plateau or a warm-up has ended. The norms of the operation then start anew, so the
next `FIRST` replies have no bound. With a single client per round, the second of two huge replies in a row is accepted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedlens.core.protocol import Answer, Ask, Failure, Reply
from fedlens.core.schema import beyond_bound
from fedlens.core.types import is_client

FIRST = 20  # accepted replies before there is a bound
KEPT = 256  # norms kept, at most


@dataclass
class NormSample:
    """Up to `KEPT` norms, evenly spaced over all that were added.

    Every norm is kept at first. Whenever the sample is full, every second one is dropped, and from then on half as many
    are kept. The same norms in the same order give the same sample.

    >>> sample = NormSample()
    >>> for norm in range(1, 1001):
    ...     sample.add(float(norm))
    >>> sample.every, len(sample.norms), sample.norms[:3]
    (4, 250, [1.0, 5.0, 9.0])
    """

    seen: int = 0
    every: int = 1
    norms: list[float] = field(default_factory=list)
    largest_median: float = 0.0

    def add(self, norm: float) -> None:
        """Counts a norm, and keeps one in `every`."""
        if self.seen % self.every == 0:
            self.norms.append(norm)
            if len(self.norms) == KEPT:
                self.norms = self.norms[::2]
                self.every *= 2
        self.seen += 1

    def typical(self) -> float | None:
        """The largest median returned so far, including this one; None before `FIRST` norms."""
        if self.seen < FIRST:
            return None
        self.largest_median = max(self.largest_median, statistics.median(self.norms))
        return self.largest_median


class NormBounds:
    """The norms of the replies that a run has accepted, by operation and by name of the tree.

    >>> from fedlens.core.protocol import Id, Request
    >>> bounds = NormBounds()
    >>> for _ in range(20):
    ...     bounds.answered("train", Reply(Id(1, 0, 0), 0, {}, norms={"update": 2.0}))
    >>> dict(bounds.bounded(Ask("train", [Request(0)])).expect.typical)
    {'update': 2.0}
    """

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, NormSample]] = {}
        # Operations of the round in progress with a reply that moved, and with one that the bound refused.
        self._moved: set[str] = set()
        self._refused: set[str] = set()

    def answered(self, op: str, answer: Answer) -> None:
        """Counts a client's answer: the norms of an accepted reply, or a failure if the bound rejected it."""
        if not is_client(answer.client):
            return
        if isinstance(answer, Failure):
            if beyond_bound(answer.reason):
                self._refused.add(op)
        elif answer.refused is None:
            self._accepted(op, answer)

    def _accepted(self, op: str, reply: Reply) -> None:
        samples = self._samples.setdefault(op, {})
        for name, norm in reply.norms.items():
            if norm:
                self._moved.add(op)
                sample = samples.get(name)
                if sample is None:
                    sample = samples[name] = NormSample()
                sample.add(norm)

    def round_done(self, replied: bool) -> list[str]:
        """Ends a round. Returns the operations whose norms start anew because the bound rejected every reply.

        Args:
            replied: whether the round's last ask had an accepted reply. If not, the norms of every operation with a
                reply beyond the bound start anew.
        """
        anew = sorted(self._refused - self._moved if replied else self._refused)
        for op in anew:
            self._samples.pop(op, None)
        self._refused, self._moved = set(), set()
        return anew

    def bounded(self, ask: Ask) -> Ask:
        """The ask, with the typical norms in its schema."""
        if not ask.requests or not is_client(ask.requests[0].client) or not ask.expect.bounded:
            return ask  # replies from data at the server are not bounded
        samples = self._samples.get(ask.op, {})
        typical = {name: t for name, sample in samples.items() if (t := sample.typical()) is not None}
        return replace(ask, expect=replace(ask.expect, typical=typical)) if typical else ask

    def payload(self) -> dict[str, Any]:
        """A copy of everything, for a checkpoint."""
        return {
            op: {name: {**vars(sample), "norms": list(sample.norms)} for name, sample in samples.items()}
            for op, samples in self._samples.items()
        }

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> NormBounds:
        """The norms in the `payload` of a checkpoint."""
        bounds = cls()
        for op, samples in payload.items():
            bounds._samples[op] = {
                name: NormSample(**{**sample, "norms": list(sample["norms"])})
                for name, sample in samples.items()
            }
        return bounds
