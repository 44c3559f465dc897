"""Shows the progress of a study: a line that changes on a terminal, a line a run elsewhere."""

from __future__ import annotations

import time

from rich.console import Console

from fedlens.base.format import duration, label, many, metric_value
from fedlens.base.printable import printable
from fedlens.cli.cost import time_left
from fedlens.results.rows import Role, Row, validation_metric
from fedlens.studies.planned import PlannedRun

_SHOWN = 3  # running runs in the changing line


class SweepDisplay:
    """Prints the progress of a study.

    Args:
        console: where; by default standard output, or standard error with `stderr`.
    """

    def __init__(self, *, quiet: bool, stderr: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        self._quiet = quiet
        self._live = self._console.status("preparing") if self._console.is_terminal and not quiet else None
        self._running: dict[str, tuple[str, int, int, float]] = {}  # key, round, rounds, start
        self._total, self._done, self._known = 0, 0, 0
        self._since, self._ended = 0.0, 0  # of the runs that are due now
        if self._live is not None:
            self._live.start()

    def note(self, text: str) -> None:
        """Prints a sentence."""
        self._print(text)

    def runs_due(self, due: int, done: int, total: int) -> None:
        """Starts to count."""
        self._done, self._total, self._since, self._ended = done, max(total, done + due), 0.0, 0

    def run_started(self, run: PlannedRun) -> None:
        """Adds the run to the changing line."""
        now = time.monotonic()
        self._since = self._since or now  # not before: the workers start first
        self._running[run.digest] = (run.key, 0, 0, now)
        self._update()

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        """Shows the round."""
        if run.digest in self._running:
            key, _, _, start = self._running[run.digest]
            self._running[run.digest] = (key, round, rounds, start)
            self._update()

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        """Prints the outcome of the run, and how long the others take."""
        start = self._running.pop(run.digest, ("", 0, 0, time.monotonic()))[3]
        self._done, self._ended = self._done + 1, self._ended + 1
        seconds = (time.monotonic() - self._since) / self._ended
        left = time_left(seconds, self._total - self._done)
        position = f"[{self._done:>{len(str(self._total))}}/{self._total}]"
        self._print(
            f"{position} {run.key}: {outcome(line, run.role)}, {duration(time.monotonic() - start)}{left}"
        )
        self._update()

    def close(self) -> None:
        """Removes the changing line; may be called twice."""
        if self._live is not None:
            self._live.stop()

    def _update(self) -> None:
        if self._live is not None:
            shown = [
                f"{key} round {round} of {rounds}" if rounds else key
                for key, round, rounds, _ in list(self._running.values())[:_SHOWN]
            ]
            more = f" and {len(self._running) - _SHOWN} more" if len(self._running) > _SHOWN else ""
            self._live.update(
                printable(f"{self._done} of {many(self._total, 'run')}; {', '.join(shown)}{more}")
            )

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(printable(text), soft_wrap=True)


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
