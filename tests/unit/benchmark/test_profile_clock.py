from __future__ import annotations

import time

import pytest

from fedlens.benchmark.profile_clock import Clock, timed, timed_maker, timed_steps


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the clock sees: what a test adds up in here."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_part_inside_another_stops_the_others_clock(seconds: list[float]) -> None:
    clock = Clock()
    with clock.part("outer"):
        seconds[0] += 1
        with clock.part("inner"):
            seconds[0] += 10
        seconds[0] += 100
    assert clock.seconds == {"outer": 101, "inner": 10}


@pytest.mark.parametrize("whole", ["rule", "evaluation"])
def test_what_a_rule_or_an_evaluation_does_is_its_own(seconds: list[float], whole: str) -> None:
    clock = Clock()
    with clock.part("other"), clock.part(whole):
        with clock.part("forward"):
            seconds[0] += 2
            with clock.part("backward"):
                seconds[0] += 3
        seconds[0] += 1
    assert clock.seconds == {"other": 0, whole: 6}


def test_an_exception_ends_its_part(seconds: list[float]) -> None:
    clock = Clock()

    def breaks() -> None:
        seconds[0] += 4
        raise ValueError("no")

    with clock.part("other"):
        with pytest.raises(ValueError, match="no"):
            timed(clock, "forward", breaks)()
        seconds[0] += 1
    assert clock.seconds == {"other": 1, "forward": 4}


def test_the_steps_of_an_iterator_are_counted_and_not_what_is_done_between_them(seconds: list[float]) -> None:
    def batches(n: int):  # type: ignore[no-untyped-def]
        for k in range(n):
            seconds[0] += 1
            yield k

    clock = Clock()
    with clock.part("other"):
        for _ in timed_steps(clock, "data", batches)(3):
            seconds[0] += 10
    assert clock.seconds == {"other": 30, "data": 3}


def test_a_function_that_is_made_is_counted_too(seconds: list[float]) -> None:
    def made(by: float):  # type: ignore[no-untyped-def]
        seconds[0] += 1

        def step() -> float:
            seconds[0] += by
            return by

        return step

    clock = Clock()
    step = timed_maker(clock, "optimizer", made)(5.0)
    assert step() + step() == 10
    assert clock.seconds == {"optimizer": 11}


def test_a_function_that_calls_itself_is_counted_once(seconds: list[float]) -> None:
    clock = Clock()

    def down(n: int) -> None:
        seconds[0] += 1
        if n:
            again(n - 1)

    again = timed(clock, "reply", down)
    with clock.part("other"):
        again(3)
    assert clock.seconds == {"other": 0, "reply": 4}
    assert clock.calls["reply"] == 1
