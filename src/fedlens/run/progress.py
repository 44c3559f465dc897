"""Reports the progress of a run to a listener."""

from __future__ import annotations

from typing import Any, Protocol

from fedlens.core.step_counts import Work


class Progress(Protocol):
    """A listener for the progress of a run. It never changes a result."""

    def started(self, plan: dict[str, Any]) -> None:
        """The run starts: its name, rounds, clients, clients_per_round, algorithm, dataset, model, ..., directory."""
        ...

    def round_done(self, metrics: dict[str, Any]) -> None:
        """A round is over; `metrics` is its line of metrics.jsonl."""
        ...

    def note(self, text: str) -> None:
        """Receives one sentence for the user."""
        ...

    def finished(self, summary: dict[str, Any]) -> None:
        """The run has ended, with any status; `summary` is summary.json."""
        ...


class Listener:
    """What every listener may follow, each with a default that does nothing."""

    def started(self, plan: dict[str, Any]) -> None:
        """The run starts; see `Progress.started`."""

    def working(self, work: Work) -> None:
        """Called when a phase of a round begins, when clients are asked, and after each answer.

        It is called in the thread of the run, once for each client, so it has to be fast. `work` is live: its numbers
        grow as the phase goes on, and another thread may read them.
        """

    def note(self, text: str) -> None:
        """Receives one sentence for the user."""

    def problem(self, text: str) -> None:
        """One sentence on something that went wrong and did not end the run; by default passed on to `note`."""
        self.note(text)

    def finished(self, summary: dict[str, Any]) -> None:
        """The run has ended, with any status; `summary` is summary.json."""


class ProgressBase(Listener, Progress):
    """A listener that gets each round as its line of metrics.jsonl, and what else it may follow, with defaults.

    An `fedlens.Observer` also gets the server state and the tally of a round. A listener that has only the four methods
    of `Progress` hears no more than these.

    >>> class Clients(ProgressBase):
    ...     def working(self, work: Work) -> None:
    ...         print(f"round {work.round}: {work.answered} of {work.asked}")
    >>> Clients().working(Work(round=1))
    round 1: 0 of 0
    """

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Does nothing."""
