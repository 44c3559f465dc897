"""Describes how far a round is and how long it still takes, as text."""

from __future__ import annotations

from collections.abc import Iterable

from fedlens.base.format import count, duration, many
from fedlens.core.step_counts import Work
from fedlens.run.progress import Forecast

_CLIENTS = 3  # after so many answers, or after _SECONDS with _PART done, the first estimate is made
_SECONDS, _PART = 15.0, 0.02
_LONG = 60.0  # seconds: shorter runs need no estimate
_CHANGE = 1.3  # a later estimate that differs by this factor is printed too
_ESTIMATES = 4  # at most


class StatusLine:
    """The text of a run's progress: a status line, and the estimates of the whole run."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._began: float | None = None  # of the training in this process
        self._said: float | None = None  # seconds that the last estimate gave the whole run
        self._estimates = 0
        self._left: tuple[float, float] | None = None  # seconds left in the run, and when that was estimated

    def text(self, now: float) -> str | None:
        """The status line of the phase in progress; None if there is none.

        >>> forecast, work = Forecast(), Work(round=1, rounds=100, clock=lambda: 0.0)
        >>> work.ask(range(10))
        >>> forecast.follow(work, now=0.0)
        >>> StatusLine(forecast).text(now=30.0)
        'round 1/100: 0 of 10 clients after 30 s'
        >>> for _ in range(3):
        ...     work.answer()
        >>> StatusLine(forecast).text(now=100.0)
        'round 1/100: 3 of 10 clients, about 4 min left in this round, 9 h 15 min in the run'
        """
        work = self._forecast.work
        if work is None or not work.asked:
            return None
        head = f"round {work.round}/{work.rounds}"
        done, left, run = _done(work), self._forecast.round_left(now), self._forecast.run_left(now)
        if left is None:
            return f"{head}: {done} after {roughly(now - work.began)}"
        of_run = f", {roughly(run)} in the run" if run is not None and work.rounds > 1 else ""
        if work.phase == "evaluating":
            return f"{head}: {done}, about {roughly(left)} left"
        return f"{head}: {done}, about {roughly(left)} left in this round{of_run}"

    def short(self, done: int) -> str:
        """The round in progress, for the progress bar; `done` is the last finished round.

        >>> forecast, work = Forecast(), Work(round=1, rounds=3, clock=lambda: 0.0)
        >>> work.ask(range(5))
        >>> forecast.follow(work, now=0.0)
        >>> StatusLine(forecast).short(done=0)
        'round 1/3: 0 of 5 clients'
        """
        work = self._forecast.work
        if work is None and not done:
            return "evaluating the untrained model"
        head = f"round {done if work is None else max(work.round, done)}/{self._forecast.rounds}"
        return f"{head}: {_done(work)}" if work and work.asked and work.fraction < 1.0 else head

    def left(self, now: float) -> str:
        """The time left in the run, for the progress bar: `42 s left`; empty if nothing is known yet.

        Counts down from the last estimate where none can be made, for example during the first evaluation.
        """
        left = self._forecast.run_left(now)
        if left is not None:
            self._left = left, now
        elif self._left is not None:
            left = max(0.0, self._left[0] - (now - self._left[1]))
        return "" if left is None else f"{roughly(left)} left"

    def first_estimate(self, now: float) -> str | None:
        """The first estimate of the whole run, as soon as there is one; None once it was given.

        >>> forecast, work = Forecast(), Work(round=1, rounds=100, clock=lambda: 0.0)
        >>> work.ask(range(10))
        >>> forecast.follow(work, now=0.0)
        >>> for _ in range(3):
        ...     work.answer()
        >>> line = StatusLine(forecast)
        >>> line.first_estimate(now=24.0), line.first_estimate(now=25.0)
        ('about 2 h 15 min for 100 rounds, estimated from the first 3 clients', None)
        """
        work = self._forecast.work
        if self._estimates or work is None or work.phase != "training" or not work.asked:
            return None
        if self._began is None:
            self._began = work.began
        enough = work.answered >= min(_CLIENTS, work.asked)
        steps = not enough and now - work.began >= _SECONDS and work.fraction >= _PART
        if not enough and not steps:
            return None
        left = self._forecast.run_left(now)
        if left is None:
            return None
        self._estimates, self._said = 1, now - self._began + left
        if self._said < _LONG:
            return None
        of = f"the first {many(work.answered, 'client')}" if work.answered else f"{_part(work)} of a round"
        rounds = many(work.rounds - work.round + 1, "round")
        return f"about {roughly(self._said)} for {rounds}, estimated from {of.replace('first 1 ', 'first ')}"

    def better_estimate(self, now: float) -> str | None:
        """An estimate at the end of a round, if it differs from the last one by a good part."""
        work, left = self._forecast.work, self._forecast.run_left(now)
        if self._said is None or self._began is None or left is None or work is None:
            return None
        whole = now - self._began + left
        if max(whole, self._said) < _LONG or self._estimates >= _ESTIMATES:
            return None
        if max(whole, self._said) < _CHANGE * min(whole, self._said):
            return None
        self._said, self._estimates = whole, self._estimates + 1
        return f"now about {roughly(left)} left for the run"


def fitting(parts: Iterable[str], width: int) -> str:
    """The leading parts that fit into `width` characters, two spaces apart; empty parts are left out.

    >>> fitting(["42 s left", "", "accuracy 0.81", "1,532 images/s"], width=30)
    '42 s left  accuracy 0.81'
    """
    text = ""
    for part in filter(None, parts):
        longer = f"{text}  {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


def _done(work: Work) -> str:
    """What is done of a phase: `3 of 10 clients`, `evaluating (30 %)`.

    >>> work = Work(phase="evaluating")
    >>> work.ask(range(10))
    >>> work.answer()
    >>> _done(work)
    'evaluating (10 %)'
    """
    part = _part(work)
    if work.phase == "evaluating":
        return f"evaluating ({part})"
    clients = f"{count(work.answered)} of {many(work.asked, 'client')}"
    started = f" ({part} done)" if work.fraction > 0 and not work.answered else ""
    return clients + started + (f" in exchange {work.exchanges}" if work.exchanges > 1 else "")


def _part(work: Work) -> str:
    return f"{work.fraction:.0%}".replace("%", " %")


def roughly(seconds: float) -> str:
    """A time as an estimate deserves it, with one or two digits.

    >>> [roughly(s) for s in (0.2, 42, 100, 3000, 7700, 200_000)]
    ['1 s', '42 s', '2 min', '50 min', '2 h 10 min', '2 d 7 h']
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 59.5 * 60:
        return f"{round(seconds / 60)} min"
    return duration(300.0 * round(seconds / 300))
