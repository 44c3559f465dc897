"""Warns of a run that diverges, and ends one that is in vain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedlens.core.driver import Tally
from fedlens.core.protocol import Payload, State
from fedlens.core.schema import not_finite
from fedlens.core.tree import all_finite
from fedlens.core.types import client_name
from fedlens.observers.divergence import (
    Extremes,
    Warned,
    divergence_of,
    refuse_collapsed,
    rejected_by_bound,
    text_of,
)
from fedlens.run.build import Built
from fedlens.run.failed_round import NotFiniteReplies, diverged
from fedlens.run.observer import ObservedRun, Observer, Place


class DivergenceWatch(Observer):
    """Reports what each round shows of divergence, and ends a run whose model is not finite.

    Attributes:
        divergence: the warnings so far; see `fedlens.observers.divergence`.
        warned: the new warnings of the last round.
    """

    place = Place.WATCH
    part_name = "divergence"
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._built, self._name = built, partial(client_name, ids=built.partition.ids)
        self.divergence = divergence_of(built)
        self.warned: list[Warned] = []
        self._problem: Callable[[str], None] = lambda sentence: None
        self._replies, self._lossless = NotFiniteReplies(), False  # of the round

    def restore(self, part: Payload) -> None:
        """Continues from the state at a checkpoint."""
        self.divergence.state = part

    def part(self) -> Payload:
        """The state, which is replaced and never changed."""
        return self.divergence.state

    def began(self, run: ObservedRun) -> None:
        """See `Observer`."""
        self._problem = run.problem

    def released(self, round: int, state: State, tally: Tally) -> None:
        """Finds the replies that are not finite: those of the evaluation do not count."""
        self._replies, self._lossless = NotFiniteReplies.of(tally, self._name), False

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Notes whether a loss of the evaluation is not finite."""
        self._lossless = any(not math.isfinite(value) for name, value in metrics.items() if "loss" in name)
        return {}

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Warns. Raises `RunFailed` if the model itself is not finite, from which no round can go on."""
        self._watch(metrics, tally, self._replies)
        if metrics["round"] and self._lossless:
            _, model = self._built.algorithm.model(state)
            if not all_finite(list(model.values())):
                raise diverged(metrics["round"], self._built.config.local.lr)

    def failed(self, round: int, tally: Tally) -> None:
        """Warns of a loss that is not finite."""
        reasons = [reason for counts in tally.failures.values() for reason in counts]
        if not math.isfinite(tally.sums.get("loss", 0.0)) or any(map(not_finite, reasons)):
            self._watch({"round": round, "local_loss": math.nan}, tally)

    def _watch(self, line: Mapping[str, Any], tally: Tally, replies: NotFiniteReplies | None = None) -> None:
        rejected = rejected_by_bound(line["round"], tally, self._name)
        self.warned = self.divergence.after(line, Extremes.of(tally, self._name), rejected, replies)
        for warning in self.warned:
            self._problem(text_of(warning))

    def summary(self) -> Mapping[str, Any]:
        """The warnings."""
        return {"warnings": self.divergence.warnings}


class EndInVain(Observer):
    """Ends a run after a round in which embeddings have collapsed, or replies were not finite for too long.

    The round is complete then: the run can be resumed after it.
    """

    place = Place.END
    ends_run = True

    def __init__(self, watch: DivergenceWatch, rounds: int) -> None:
        self._watch, self._rounds = watch, rounds

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Raises `RunFailed`, except in the last round."""
        if metrics["round"] < self._rounds:
            refuse_collapsed(self._watch.warned)
            self._watch.divergence.refuse()
