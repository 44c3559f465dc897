"""How long a round and a run still take, from what has been done so far."""

from __future__ import annotations

from fedlens.cli.display.forecast import Forecast
from fedlens.core.step_counts import Work


def test_the_pace_of_the_last_rounds_counts_and_time_since_then() -> None:
    forecast = Forecast(rounds=30)
    for round in range(5):
        forecast.round_done(round, 100.0 * round, 100.0, now=100.0 * round)
    for round in range(5, 15):
        forecast.round_done(round, 400.0 + 10.0 * (round - 4), 10.0, now=400.0 + 10.0 * (round - 4))
    assert forecast.pace == 10.0
    assert forecast.run_left(now=500.0) == 160.0
    assert forecast.run_left(now=504.0) == 156.0


def test_a_round_of_several_exchanges_is_estimated_from_the_one_before() -> None:
    forecast = Forecast()
    work = Work(round=1, rounds=3)
    for start in (0.0, 10.0):
        work.ask(range(2))
        forecast.follow(work, now=start)
    forecast.round_done(1, 40.0, 40.0, now=40.0)
    following = Work(round=2, rounds=3)
    following.ask(range(2))
    forecast.follow(following, now=40.0)
    following.answer()
    assert forecast.round_left(now=45.0) == 35.0


def test_the_estimate_never_grows_while_a_client_is_awaited() -> None:
    forecast = Forecast()
    work = Work(round=1, rounds=3)
    work.ask(range(5))
    forecast.follow(work, now=0.0)
    left = []
    for now in range(1, 51):
        if now % 10 == 0:
            work.answer()
        if work.answered:
            left.append((forecast.round_left(float(now)), forecast.run_left(float(now))))
    assert left[0] == (40.0, 140.0)
    assert left[-1] == (0.0, 100.0)
    assert left == sorted(left, reverse=True)
    # A client that takes longer than any before it holds the estimate, and does not raise it.
    slow = Work(round=1, rounds=3)
    slow.ask(range(2))
    forecast.follow(slow, now=100.0)
    slow.answer()
    assert [forecast.run_left(now) for now in (110.0, 115.0, 200.0)] == [50.0, 45.0, 40.0]
