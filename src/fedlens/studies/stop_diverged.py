"""Stops a run of a study when its loss diverges, to save the cost of its other rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.errors import RunFailed
from fedlens.core.step_counts import Work
from fedlens.observers.divergence import COLLAPSE, Divergence, Extremes
from fedlens.results.run import Run
from fedlens.run.observer import Listening
from fedlens.run.progress import Progress, ProgressBase
from fedlens.studies.halving import DIVERGED

if TYPE_CHECKING:
    from fedlens.core.driver import Tally
    from fedlens.core.protocol import State

KINDS = ("loss-not-finite", "loss-jump", COLLAPSE)  # of `fedlens.observers.divergence`


class RunDiverged(RunFailed):
    """A run that was stopped because its loss diverged; its study counts it as failed."""


class StopDiverged(Listening):
    """A listener that ends a run when its loss is not finite, or stays at 100 times its earlier level or above.

    It also ends a self-supervised run whose embeddings have collapsed, as the run itself does unless it is resumed.

    The limits are those of the warnings of every run, see `fedlens.observers.divergence`. Interruptions do
    not change the round after which the run ends. All calls are passed on to `listener`.

    >>> stop = StopDiverged()
    >>> stop.take([{"round": 0, "test_loss": 2.3}])
    >>> try:
    ...     for round in (1, 2, 3):
    ...         stop.take([{"round": round, "test_loss": 900.0}])
    ...         stop.refuse()
    ... except RunDiverged as error:
    ...     print(error)
    diverged in round 3: The test loss has been more than 100 times the lowest value before (2.3) since round 1: ...
    """

    def __init__(self, listener: Progress | None = None) -> None:
        super().__init__(listener or ProgressBase())
        self._divergence = Divergence(rounds=1, lr=1.0)
        self._why: str | None = None

    def started(self, plan: dict[str, Any]) -> None:
        """Reads the earlier rounds of the run, and passes the call on."""
        advice = plan.get("collapse_advice")
        self._divergence = Divergence(rounds=plan.get("rounds", 1), lr=1.0, collapse_advice=advice)
        self.take(Run.open(Path(plan["directory"])).metrics)
        super().started(plan)

    def working(self, work: Work) -> None:
        """Passes the call on. Raises `RunDiverged` if the rounds before the start have diverged already."""
        super().working(work)
        self.refuse()

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Passes the call on. Raises `RunDiverged` if the loss has diverged in this round."""
        super().round_done(state, tally, metrics)
        self.take([metrics])
        self.refuse()

    def take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Checks lines of metrics.jsonl."""
        for line in lines:
            for warning in self._divergence.after(line, Extremes()):
                if warning["kind"] in KINDS and self._why is None:
                    self._why = f"{DIVERGED} {line['round']}: {warning['sentence']}"

    def refuse(self) -> None:
        """Raises `RunDiverged` if the loss has diverged in the lines so far."""
        if self._why is not None:
            raise RunDiverged(self._why)


def refuse_diverged(directory: Path) -> None:
    """Raises `RunDiverged` if the loss of a paused or finished run has diverged.

    A run without further rounds is not trained, so no listener is called.
    """
    run, stop = Run.open(directory), StopDiverged()
    stop.take(run.metrics)
    stop.refuse()
    for warning in run.summary.get("warnings", ()):
        if warning["kind"] == COLLAPSE:
            raise RunDiverged(f"{DIVERGED} {warning['until']}: {warning['sentence']}")
