"""Follows the progress of runs that belong together."""

from __future__ import annotations

from fedlens.results.rows import Row
from fedlens.studies.planned import PlannedRun


class StudyProgress:
    """A listener for the progress of a study, or of `cost`. It never changes a result.

    Inherit from it to override some methods; the others do nothing.
    """

    def note(self, text: str) -> None:
        """Receives one sentence for the user."""

    def runs_due(self, due: int, done: int, total: int) -> None:
        """`due` runs start now, `done` have ended, of about `total`. Called again for each rung of tuning."""

    def run_started(self, run: PlannedRun) -> None:
        """A run starts, or is resumed."""

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        """A run is at round `round` of `rounds`; not every round is reported."""

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        """A run has ended: finished, stopped or failed."""
