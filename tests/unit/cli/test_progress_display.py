"""What a person sees of a run, at which moments; the clock is the test's."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from fedlens.cli.progress_display import ProgressDisplay
from fedlens.core.work import StepCount, Work

PLAN = {"name": "a", "rounds": 100, "clients": 40, "clients_per_round": 10, "directory": "d", "model": "m"}


class Screen:
    """A display, its clock and what is printed."""

    def __init__(self, terminal: bool = False) -> None:
        self.now, self.file = 0.0, io.StringIO()
        shown = Console(
            file=self.file, force_terminal=terminal, width=120, highlight=False, markup=False, emoji=False
        )
        self.display = ProgressDisplay(shown, clock=lambda: self.now)
        self.display.started(PLAN)
        self.seen = 0

    def phase(self, phase: Any = "training", round: int = 1, **more: Any) -> Work:
        work = Work(
            phase, round, 100, evaluations=100, tell=self.display.working, clock=lambda: self.now, **more
        )
        work.ask(range(10))
        return work

    def after(self, seconds: float, act: Callable[[], None] | None = None) -> list[str]:
        """The lines that are new after so many seconds, in which the display is looked at once a second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.display.tick()
        if act is not None:
            act()
        new = self.file.getvalue()[self.seen :]
        self.seen += len(new)
        return new.splitlines()


@pytest.fixture
def screen() -> Screen:
    screen = Screen()
    screen.after(0)
    return screen


def test_a_line_after_each_15_s_of_silence_and_none_per_client(screen: Screen) -> None:
    work = screen.phase()
    for _ in range(3):
        screen.after(1, work.answer)
    assert screen.after(14, work.answer) == []
    assert screen.after(1) == [
        "round 1/100: 4 of 10 clients, about 27 s left in this round, 1 h 15 min in the run"
    ]
    assert screen.after(14) == []
    assert len(screen.after(1)) == 1


def test_silence_is_told_where_nothing_arrives_at_all(screen: Screen) -> None:
    screen.phase()
    assert screen.after(15) == ["round 1/100: 0 of 10 clients after 15 s"]
    assert screen.after(15) == ["round 1/100: 0 of 10 clients after 30 s"]


def test_an_answer_ends_no_silence_but_a_round_does(screen: Screen) -> None:
    work = screen.phase("evaluating")
    screen.after(10, work.answer)
    assert len(screen.after(5)) == 1
    screen.after(10)
    screen.display.round_done({"round": 1, "seconds": 25.0, "elapsed": 25.0})
    screen.phase(round=2)
    assert screen.after(14) == ["round 1/100  25 s"]
    assert len(screen.after(1)) == 1


def test_one_huge_client_is_followed_by_its_steps(screen: Screen) -> None:
    count = StepCount()
    work = Work(
        "training", 1, 100, tell=screen.display.working, clock=lambda: screen.now, count=lambda: count
    )
    work.ask(["@train"])
    count.begin(steps=1000)
    count.done = 250
    assert screen.after(15) == ["about 1 h 40 min for 100 rounds, estimated from 25 % of a round"]
    count.done = 500
    assert screen.after(15) == [
        "round 1/100: 0 of 1 client (50 % done), about 30 s left in this round, 1 h 40 min in the run"
    ]


def test_the_run_is_estimated_once_from_the_first_clients_and_corrected_later(screen: Screen) -> None:
    evaluation = screen.phase("evaluating", round=0)
    screen.after(6)
    for _ in range(10):
        evaluation.answer()
    screen.display.round_done({"round": 0, "elapsed": 6.0, "seconds": 0.0})
    work = screen.phase()
    screen.after(3, work.answer)
    screen.after(3, work.answer)
    # 30 s of training and 6 s of evaluation a round.
    assert screen.after(3, work.answer) == ["about 1 h for 100 rounds, estimated from the first 3 clients"]
    for _ in range(7):
        screen.after(3, work.answer)
    screen.display.round_done({"round": 1, "elapsed": 42.0, "seconds": 30.0})
    assert screen.after(0) == ["round 1/100  30 s"]
    screen.phase(round=2)
    screen.display.round_done({"round": 2, "elapsed": 52.0, "seconds": 8.0})  # workers have taken over
    assert screen.after(0) == ["round 2/100  8.0 s", "now about 38 min left for the run"]


def test_a_short_run_needs_no_estimate(screen: Screen) -> None:
    work = screen.phase()
    for _ in range(10):
        work.answer()
    assert screen.after(0) == []


def test_an_evaluation_says_so(screen: Screen) -> None:
    work = screen.phase("evaluating", round=7)
    assert screen.after(15) == ["round 7/100: evaluating (0 %) after 15 s"]
    for _ in range(3):
        work.answer()
    assert screen.after(15) == ["round 7/100: evaluating (30 %), about 70 s left"]


def test_a_further_exchange_of_the_same_round_is_named(screen: Screen) -> None:
    work = screen.phase()
    work.ask(range(10))
    assert screen.after(15) == ["round 1/100: 0 of 10 clients in exchange 2 after 15 s"]


def test_on_a_terminal_the_bar_moves_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(terminal=True)
    work = screen.phase()
    for _ in range(3):
        work.answer()
    screen.after(10)
    text = screen.file.getvalue()
    assert "3 of 10 clients" in text
    assert "55 min left" in text
    screen.display.close()


def test_a_run_goes_on_without_output_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    screen.file.write = full  # type: ignore[method-assign]
    screen.display.round_done({"round": 0})
    screen.phase()
    screen.display.round_done({"round": 1})
    screen.display.note("unheard")
    screen.display.close()
    assert screen.display.lost is not None
    said = "warning: standard output cannot be written: No space left on device; the run continues without output\n"
    assert capsys.readouterr().err == said


def test_quiet_shows_problems_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.display._quiet = True
    before = screen.file.getvalue()
    screen.phase()
    screen.after(40)
    assert screen.file.getvalue() == before
    screen.display.problem("the result page could not be written: \x1b")
    assert capsys.readouterr().err == "warning: the result page could not be written: \\x1b\n"
