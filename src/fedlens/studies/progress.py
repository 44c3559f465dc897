"""Follows the progress of a study."""

from __future__ import annotations

from typing import Protocol

from fedlens.results.rows import Row
from fedlens.studies.planned import PlannedRun


class StudyProgress(Protocol):
    """A listener for the progress of a study. It never changes a result."""

    def note(self, text: str) -> None:
        """Receives one sentence for the user."""
        ...

    def runs_due(self, due: int, done: int, total: int) -> None:
        """`due` runs start now, `done` have ended, of about `total`. Called again for each rung of tuning."""
        ...

    def run_started(self, run: PlannedRun) -> None:
        """A run starts, or is resumed."""
        ...

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        """A run is at round `round` of `rounds`; not every round is reported."""
        ...

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        """A run has ended: finished, stopped or failed."""
        ...


class SilentStudy:
    """A listener that does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""

    def runs_due(self, due: int, done: int, total: int) -> None:
        """Does nothing."""

    def run_started(self, run: PlannedRun) -> None:
        """Does nothing."""

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        """Does nothing."""

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        """Does nothing."""
