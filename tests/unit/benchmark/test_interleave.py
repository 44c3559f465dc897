"""Turns are taken in turn; who fails is out and the rest goes on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from fedlens.base.errors import RunFailed
from fedlens.benchmark.interleave import Measurement, fastest, take_turns
from tests.unit.benchmark.fakes import Fake, measurement


def breaks(after: int, error: BaseException) -> Iterator[float]:
    yield from [1.0] * after
    raise error


def test_the_first_round_warms_up_and_the_order_is_drawn_for_each_turn() -> None:
    log: list[str] = []
    a, b = (
        measurement("a", lambda: itertools.count(10.0), log),
        measurement("b", lambda: itertools.count(20.0), log),
    )
    take_turns([a, b], 8)
    assert (a.seconds, b.seconds) == (list(range(11, 19)), list(range(21, 29)))
    assert (a.first_round, b.first_round, a.about) == (10.0, 20.0, {"name": "a"})
    assert (log[:2], log[-2:]) == (["a", "b"], ["b ends", "a ends"])
    turns = ["".join(log[at : at + 2]) for at in range(2, 18, 2)]
    assert set(turns) == {"ab", "ba"}


def test_two_of_one_name_have_rounds_of_their_own() -> None:
    one, two = (
        measurement("same", lambda: itertools.count(1.0), []),
        measurement("same", lambda: itertools.count(5.0), []),
    )
    take_turns([one, two], 2)
    assert (one.seconds, two.seconds) == ([2, 3], [6, 7])


@pytest.mark.parametrize("after", [0, 1, 2])
def test_who_fails_is_out_and_says_why(after: int) -> None:
    log: list[str] = []
    good = measurement("good", lambda: itertools.count(1.0), log)
    bad = measurement("bad", lambda: breaks(after, RunFailed("the worker is gone", hint="mend it")), log)
    take_turns([bad, good], 3)
    assert good.seconds == [2, 3, 4]
    assert (bad.seconds, bad.ran, bad.reason) == ([], False, "the worker is gone; mend it")
    assert {"good ends", "bad ends"} <= set(log)
    assert log.count("bad") == after + 1  # it is not asked again


def test_what_cannot_be_started_is_out() -> None:
    log: list[str] = []

    def start() -> Fake:
        raise ValueError("two\nlines")

    good, bad = measurement("good", lambda: itertools.repeat(1.0), log), Measurement("bad", "peer", start)
    take_turns([good, bad], 1)
    assert (bad.reason, good.seconds) == ("ValueError: two lines", [1.0])


def test_an_interrupt_ends_all_and_is_passed_on() -> None:
    log: list[str] = []
    a = measurement("a", lambda: itertools.repeat(1.0), log)
    b = measurement("b", lambda: breaks(2, KeyboardInterrupt()), log)
    with pytest.raises(KeyboardInterrupt):
        take_turns([a, b], 3)
    assert log[-2:] == ["b ends", "a ends"]


def test_a_budget_ends_the_turns_but_never_before_the_first() -> None:
    log: list[str] = []

    def slow() -> Iterator[float]:
        while True:
            time.sleep(0.02)
            yield 0.02

    none, some = measurement("none", slow, log), measurement("some", slow, log)
    take_turns([none], 5, budget=0.0)
    take_turns([some], 1000, budget=0.1)
    assert len(none.seconds) == 1
    assert 1 <= len(some.seconds) <= 6


def test_the_fastest_has_the_shortest_round_and_a_failing_one_is_not_taken() -> None:
    log: list[str] = []
    rounds = {"steady": [3.0] * 50, "noisy": [9.0, 2.0] * 25}

    def start(name: str) -> Fake:
        if name == "absent":
            raise RunFailed("no")
        return Fake(name, iter(rounds[name]), log)

    assert fastest(["absent", "steady", "noisy"], start) == "noisy"
    assert fastest(["absent"], start) == "absent"
    assert fastest(["absent", "absent"], start) == "absent"
    assert {"steady ends", "noisy ends"} <= set(log)


def test_a_turn_of_short_rounds_has_as_many_as_take_half_a_second() -> None:
    log: list[str] = []
    quick, slow = (
        measurement("q", lambda: itertools.repeat(0.2), log),
        measurement("s", lambda: itertools.repeat(9.0), log),
    )
    take_turns([quick, slow], 2)
    assert quick.seconds == pytest.approx([0.2, 0.2])
    assert (log.count("q"), log.count("s")) == (1 + 2 * 3, 1 + 2 * 1)


def test_what_a_candidate_chooses_during_its_rounds_is_in_its_measurement() -> None:
    one = Fake("a", itertools.count(1.0), [])
    choices = iter([1, 1, 2, 2, 2])

    def round() -> float:
        one.about["processes"] = next(choices)
        return 1.0

    one.round = round  # type: ignore[method-assign]
    measured = Measurement("a", "fedlens", lambda: one)
    take_turns([measured], 3)
    assert measured.about == {"name": "a", "processes": 2}
