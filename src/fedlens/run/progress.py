"""Reports the progress of a run to a listener, and estimates the remaining time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fedlens.base.signatures import offers_all
from fedlens.core.step_counts import Work

_ROUNDS = 10  # the last rounds that an estimate is based on


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
    of `Progress` is wrapped in `BareProgress`.

    >>> class Clients(ProgressBase):
    ...     def working(self, work: Work) -> None:
    ...         print(f"round {work.round}: {work.answered} of {work.asked}")
    >>> Clients().working(Work(round=1))
    round 1: 0 of 0
    """

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Does nothing."""


class Silent(ProgressBase):
    """A listener that does nothing."""


@dataclass
class BareProgress(ProgressBase):
    """A listener with only the methods of `Progress`; everything else is at its default."""

    listener: Progress

    @classmethod
    def wrap(cls, listener: Progress) -> ProgressBase:
        """The listener itself if it inherits from `ProgressBase` or forwards to one that does, else wrapped.

        Raises `ConfigError` if it has only some members of `Listener`.
        """
        if offers_all(listener, "progress", Listener, Progress):
            return cast("ProgressBase", listener)
        return cls(listener)

    def started(self, plan: dict[str, Any]) -> None:
        """Passed on."""
        self.listener.started(plan)

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Passed on."""
        self.listener.round_done(metrics)

    def note(self, text: str) -> None:
        """Passed on."""
        self.listener.note(text)

    def finished(self, summary: dict[str, Any]) -> None:
        """Passed on."""
        self.listener.finished(summary)


class Forecast:
    """Estimates how long the current round and the whole run still take, from what has been done so far.

    Within a round, the time up to the last progress is extrapolated over the share of the work that is done
    (`Work.fraction`). From there the estimate counts down, for as long as the longest wait so far. The rest of the
    run is the mean of the last rounds, evaluation included; in the first round it is that round's own estimate,
    with evaluations that take as long as that of the untrained model. All times are in seconds of one clock.

    >>> forecast, work = Forecast(), Work(round=1, rounds=10, clock=lambda: 0.0)
    >>> work.ask(["a", "b", "c", "d"])
    >>> forecast.follow(work, now=0.0)
    >>> work.answer()
    >>> forecast.round_left(now=5.0), forecast.run_left(now=5.0)
    (15.0, 195.0)
    >>> forecast.round_left(now=7.0), forecast.run_left(now=7.0)
    (13.0, 193.0)
    """

    def __init__(self, rounds: int | None = None) -> None:
        self.rounds = rounds  # of the run
        self.work: Work | None = None
        self._since = 0.0  # when `work` became the current phase
        self._exchange, self._asked_at = 0, 0.0  # the current exchange, and when it was seen first
        self._progress = (
            0.0,
            0.0,
            0.0,
        )  # the exchange's fraction, when it was seen first, the longest wait for one
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_ROUNDS + 1)  # and the run's time at their ends
        self._done_at = 0.0
        self._evaluation = 0.0  # seconds of the last evaluation
        self._last: tuple[int, float] = (1, 0.0)  # exchanges and seconds of the last round's training

    def follow(self, work: Work, now: float) -> None:
        """Takes note of the phase in progress; cheap if it is still the same."""
        if work is not self.work:
            self.work, self.rounds, self._since, self._exchange = work, work.rounds, now, 0
        if work.exchanges != self._exchange:
            self._exchange, self._asked_at, self._progress = work.exchanges, now, (0.0, now, 0.0)
        self._note_progress(work, now)

    def _note_progress(self, work: Work, now: float) -> tuple[float, float, float]:
        part, (seen, at, longest) = work.fraction, self._progress
        if part != seen:
            self._progress = (part, now, max(longest, now - at))
        return self._progress

    def round_done(self, round: int, elapsed: float | None, seconds: float | None, now: float) -> None:
        """Takes note of the end of a round: the run's time, and the seconds of its training."""
        work = self.work
        if work is not None and work.phase == "evaluating":
            self._evaluation = now - self._since
        elif work is not None and seconds:
            self._last = (work.exchanges, seconds)
        if elapsed is not None:
            self._rounds.append((round, elapsed))
        self._done_at = now

    @property
    def pace(self) -> float | None:
        """Seconds a round, evaluations included; None before a whole round was seen."""
        if len(self._rounds) < 2:
            return None
        (first, began), (last, ended) = self._rounds[0], self._rounds[-1]
        return (ended - began) / (last - first) if last > first else None

    def round_left(self, now: float) -> float | None:
        """Seconds until the current phase is over; None if nothing is known yet."""
        work = self.work
        if work is None or not work.asked:
            return None
        exchanges, seconds = self._last
        if work.phase == "training" and exchanges > 1:
            return max(0.0, seconds - (now - self._since))
        part, at, longest = self._note_progress(work, now)
        if part <= 0.0:
            return None
        # Between two answers the fraction stands still, so the plain extrapolation would grow with the clock.
        return max(0.0, (at - self._asked_at) / part * (1.0 - part) - min(now - at, longest))

    def run_left(self, now: float) -> float | None:
        """Seconds until the run is over; None if nothing is known yet."""
        work, left, pace = self.work, self.round_left(now), self.pace
        if pace is not None and self.rounds is not None:
            done = self._rounds[-1][0]
            return max(pace * (self.rounds - done) - (now - self._done_at), left or 0.0)
        if work is None or left is None or work.phase != "training":
            return None
        _, at, longest = self._progress
        each = now - self._since + left - max(0.0, now - at - longest)
        later = work.rounds - work.round
        evaluations = work.evaluations * (later + 1) / work.rounds
        return left + each * later + self._evaluation * evaluations
