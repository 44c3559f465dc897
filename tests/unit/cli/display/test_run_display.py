"""What a person sees of a run, at which moments; the clock is the test's."""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from fedlens.cli.display.run_display import RunDisplay
from fedlens.core.step_counts import StepCount, Work

PLAN = {"name": "a", "rounds": 100, "clients": 40, "clients_per_round": 10, "directory": "d", "model": "m"}


class Screen:
    """A display, its clock and what is printed."""

    def __init__(self, terminal: bool = False, width: int = 120, rounds: int = 100) -> None:
        self.now, self.file = 0.0, io.StringIO()
        shown = Console(
            file=self.file, force_terminal=terminal, width=width, highlight=False, markup=False, emoji=False
        )
        self.display = RunDisplay(shown, clock=lambda: self.now, beating=False)
        self.display.started(PLAN | {"rounds": rounds})
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
        "round 1/100: 4 of 10 clients, about 24 s left in this round, 1 h 10 min in the run"
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
    assert screen.after(15) == ["round 7/100: evaluating (30 %), about 20 s left"]


def test_a_further_exchange_of_the_same_round_is_named(screen: Screen) -> None:
    work = screen.phase()
    work.ask(range(10))
    assert screen.after(15) == ["round 1/100: 0 of 10 clients in exchange 2 after 15 s"]


def on_terminal(screen: Screen) -> list[str]:
    """What was printed on a terminal, each state of the bar as one line."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line]


def evaluated(round: int, **more: Any) -> dict[str, Any]:
    return {"round": round, "test_accuracy": 0.81, "test_loss": 0.6, "elapsed": 10.0 * round, **more}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_the_bar_moves_within_a_round() -> None:
    screen = Screen(terminal=True)
    work = screen.phase()
    screen.after(10)
    for _ in range(3):
        work.answer()
    screen.after(1)
    assert "round 1/100: 3 of 10 clients" in on_terminal(screen)[-1]
    assert "55 min left" in on_terminal(screen)[-1]
    screen.display.close()


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("width", "shown", "cut"),
    [
        (45, [], ["accuracy"]),
        (80, [], ["accuracy"]),
        (100, ["accuracy 81.0 % after round 1"], ["loss"]),
        (120, ["accuracy 81.0 % after round 1  loss 0.6", "153 images/s"], []),
    ],
)
def test_a_narrow_terminal_cuts_the_speed_and_the_metrics_first(
    width: int, shown: list[str], cut: list[str]
) -> None:
    screen = Screen(terminal=True, width=width)
    screen.display.round_done(evaluated(0))
    screen.phase()
    screen.display.round_done(evaluated(1, seconds=10.0, examples=1532))
    screen.phase(round=2)
    screen.after(1)
    bar = on_terminal(screen)[-1]
    assert all(part in bar for part in ["round 2/100: 0 of 10 clients", "16 min left", *shown])
    assert not any(part in bar for part in cut)
    assert len(bar) <= width
    screen.display.close()


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("rounds", "lines"), [(20, 21), (2000, 201)])
def test_a_terminal_keeps_a_line_of_each_round_and_of_some_in_a_long_run(rounds: int, lines: int) -> None:
    screen = Screen(terminal=True, width=60, rounds=rounds)
    for round in range(rounds + 1):
        screen.display.round_done(evaluated(round, seconds=10.0, examples=1532))
    screen.display.close()
    kept = [line for line in on_terminal(screen) if line.startswith("round ")]
    assert len(kept) == lines
    assert kept[0].startswith(f"round 0/{rounds}  accuracy 0.81  loss 0.6")
    assert kept[-1].startswith(f"round {rounds}/{rounds}  ")
    assert max(map(len, kept)) <= 60


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
