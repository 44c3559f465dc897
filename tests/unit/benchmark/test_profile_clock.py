from __future__ import annotations

import time

import pytest

from fedlens.base.profiling import recording, scope, scoped
from fedlens.benchmark.profile_engine import Clock


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
        with pytest.raises(ValueError, match="no"), clock.part("forward"):
            breaks()
        seconds[0] += 1
    assert clock.seconds == {"other": 1, "forward": 4}


def test_recorded_scopes_are_charged_to_their_parts(seconds: list[float]) -> None:
    def batches(n: int):  # type: ignore[no-untyped-def]
        for k in range(n):
            seconds[0] += 1
            yield k

    clock = Clock()
    with recording(clock.part), scope("other"):
        for _ in scoped("data", batches(3)):
            seconds[0] += 10
    assert clock.seconds == {"other": 30, "data": 3}
