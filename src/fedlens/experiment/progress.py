"""What a run says while it goes on, to whoever listens."""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """A listener. Nothing it does changes a result."""

    def started(self, plan: dict[str, Any]) -> None:
        """The run begins: its name, rounds, clients, clients_per_round, algorithm, dataset, model, ..., directory."""
        ...

    def round_done(self, metrics: dict[str, Any]) -> None:
        """A round is over; `metrics` is its line of metrics.jsonl."""
        ...

    def note(self, text: str) -> None:
        """One sentence that a person should see."""
        ...

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is over, in whatever way; `summary` is summary.json."""
        ...


class Silent:
    """A listener that does nothing."""

    def started(self, plan: dict[str, Any]) -> None:
        """Nothing."""

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def finished(self, summary: dict[str, Any]) -> None:
        """Nothing."""
