"""Shows the progress of runs that belong together: a bar on a terminal, a line a run elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedlens.base.format import duration, label, many, metric_value
from fedlens.cli.display.forecast import Forecast
from fedlens.cli.display.live_display import LiveDisplay
from fedlens.results.rows import Role, Row, validation_metric
from fedlens.studies.progress import StudyProgress

if TYPE_CHECKING:
    from rich.console import Console

    from fedlens.studies.planned import PlannedRun

_SHOWN = 3  # running runs beside the bar
_SILENCE = 15.0  # seconds after which a line says how far the one run is, without a terminal


class RunsDisplay(LiveDisplay, StudyProgress):
    """The progress of a study or of `cost`.

    Args:
        outcome: the words for the result of a run.
    """

    work = "study"

    def __init__(
        self,
        console: Console,
        quiet: bool = False,
        outcome: Callable[[Row, Role], str] = lambda row, role: outcome(row, role),
        **how: Any,
    ) -> None:
        super().__init__(console, quiet, **how)
        self._outcome = outcome
        self._running: dict[str, tuple[Forecast, int, float]] = {}  # by key: its forecast, round, start
        self._total, self._done = 0, 0
        self._since, self._ended, self._said = 0.0, 0, 0.0  # of the runs that are due now
        if not quiet:
            self.begin("preparing", None)

    def note(self, text: str) -> None:
        """Prints a sentence."""
        self._say(text)

    def runs_due(self, due: int, done: int, total: int) -> None:
        """Starts to count."""
        self._done, self._total, self._since, self._ended = done, max(total, done + due), 0.0, 0

    def run_started(self, run: PlannedRun) -> None:
        """Adds the run to the changing line."""
        now = self._clock()
        self._since = self._since or now  # not before: the workers start first
        self._running[run.key], self._said = (Forecast(), 0, now), now

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        """Takes note of the round, and says it after a long silence."""
        if run.key not in self._running:  # of two with the same name, one has ended
            return
        now = self._clock()
        forecast, _, start = self._running[run.key]
        forecast.rounds, self._running[run.key] = rounds, (forecast, round, start)
        forecast.round_done(round, now, None, now)
        if self._bar is None and len(self._running) == 1 and now - self._said >= _SILENCE:
            left, self._said = forecast.run_left(now), now
            after = f", {duration(left)} left in this run" if left is not None else ""
            self._say(f"{self._position(self._done + 1)} {run.key}: round {round} of {rounds}{after}")

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        """Prints the outcome of the run, and how long the others take."""
        now, self._done = self._clock(), self._done + 1
        started = self._running.pop(run.key, None)
        said = self._outcome(line, run.role)
        if started is not None:
            self._ended += 1
            warnings = int(line.facts.get("warnings") or 0)
            took = duration(now - started[2]) + (f", {many(warnings, 'warning')}" if warnings else "")
            said += f" ({took})" if line.status == "failed" else f", {took}"  # a reason is a sentence
            said += time_left((now - self._since) / self._ended, self._total - self._done)
        elif line.status == "finished":
            said = "finished before"
        self._say(f"{self._position(self._done)} {run.key}: {said}")
        self.tick()

    def _position(self, number: int) -> str:
        return f"[{number:>{len(str(self._total))}}/{self._total}]"

    def _update(self, now: float) -> None:
        if self._bar is None:
            return
        running = [
            f"{key} round {round} of {forecast.rounds}" if forecast.rounds else key
            for key, (forecast, round, _) in list(self._running.items())
        ]
        more = f"and {len(running) - _SHOWN} more" if len(running) > _SHOWN else ""
        parts = sum(
            round / (forecast.rounds or math.inf) for forecast, round, _ in list(self._running.values())
        )
        head = f"{self._done} of {many(self._total, 'run')}" if self._total else "preparing"
        self._move(head, self._done + parts, self._total or None, [*running[:_SHOWN], more])

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._print(text, soft_wrap=True)


def outcome(line: Row, role: Role = "final") -> str:
    """Returns the outcome of a run in words: its main metric, or the reason why it has none.

    A tuning run is compared on validation data, so its outcome is the validation metric.

    >>> outcome(Row("0f", "r", "finished", None, 2, "test_accuracy", {"test_accuracy": [0.1, 0.8]}))
    'test accuracy 80.0 %'
    >>> outcome(Row("0f", "r", "failed", "the loss is not finite (round 2).", 2, "test_accuracy", {}))
    'failed: the loss is not finite (round 2)'
    """
    if line.status == "failed":
        return f"failed: {(line.reason or '').removesuffix('.')}"
    main = validation_metric(line.main) if role == "tune" else line.main
    main = main if line.series(main) else line.main
    value = line.final(main)
    result = f"{label(main)} {metric_value(main, value)}" if value is not None else "no value"
    return f"{result}, {line.reason or 'stopped'}" if line.status == "stopped" else result


def time_left(seconds: float, runs: int) -> str:
    """The time for `runs` more runs of so many seconds each, after a semicolon; empty for none.

    >>> time_left(24.2, 15), time_left(24.2, 0)
    ('; about 6 min left for 15 runs', '')
    """
    whole = seconds * runs
    rounded = 60 * round(whole / 60) if whole >= 90 else max(1, round(whole))
    return f"; about {duration(rounded).replace('.0 s', ' s')} left for {many(runs, 'run')}" if runs else ""
