"""Estimates how long a round and a run still take, and says how far they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fedlens.base.format import count, duration, many
from fedlens.core.step_counts import Work

_ROUNDS = 10  # the last rounds that an estimate is based on
_CLIENTS = 3  # after so many answers, or after _SECONDS with _PART done, the first estimate is made
_SECONDS, _PART = 15.0, 0.02
_LONG = 60.0  # seconds: shorter runs need no estimate
_CHANGE = 1.3  # a later estimate that differs by this factor is printed too
_ESTIMATES = 4  # at most


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
        # The exchange's fraction, when it was seen first, the longest wait for one.
        self._progress = (0.0, 0.0, 0.0)
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_ROUNDS + 1)  # and the run's time at their ends
        self._done_at = 0.0
        self._evaluation = 0.0  # seconds of the last evaluation
        self._last: tuple[int, float] = (1, 0.0)  # exchanges and seconds of the last round's training
        self._began: float | None = None  # of the training in this process
        self._said: float | None = None  # seconds that the last estimate gave the whole run
        self._estimates = 0
        self._left: tuple[float, float] | None = None  # seconds left in the run, and when that was estimated

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

    def text(self, now: float) -> str | None:
        """The status line of the phase in progress; None if there is none.

        >>> forecast, work = Forecast(), Work(round=1, rounds=100, clock=lambda: 0.0)
        >>> work.ask(range(10))
        >>> forecast.follow(work, now=0.0)
        >>> forecast.text(now=30.0)
        'round 1/100: 0 of 10 clients after 30 s'
        >>> for _ in range(3):
        ...     work.answer()
        >>> forecast.text(now=100.0)
        'round 1/100: 3 of 10 clients, about 4 min left in this round, 9 h 15 min in the run'
        """
        work = self.work
        if work is None or not work.asked:
            return None
        head = f"round {work.round}/{work.rounds}"
        done, left, run = _done(work), self.round_left(now), self.run_left(now)
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
        >>> forecast.short(done=0)
        'round 1/3: 0 of 5 clients'
        """
        work = self.work
        if work is None and not done:
            return "evaluating the untrained model"
        head = f"round {done if work is None else max(work.round, done)}/{self.rounds}"
        return f"{head}: {_done(work)}" if work and work.asked and work.fraction < 1.0 else head

    def left(self, now: float) -> str:
        """The time left in the run, for the progress bar: `42 s left`; empty if nothing is known yet.

        Counts down from the last estimate where none can be made, for example during the first evaluation.
        """
        left = self.run_left(now)
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
        >>> forecast.first_estimate(now=24.0), forecast.first_estimate(now=25.0)
        ('about 2 h 15 min for 100 rounds, estimated from the first 3 clients', None)
        """
        work = self.work
        if self._estimates or work is None or work.phase != "training" or not work.asked:
            return None
        if self._began is None:
            self._began = work.began
        enough = work.answered >= min(_CLIENTS, work.asked)
        steps = not enough and now - work.began >= _SECONDS and work.fraction >= _PART
        if not enough and not steps:
            return None
        left = self.run_left(now)
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
        work, left = self.work, self.run_left(now)
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
