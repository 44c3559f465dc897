"""What a person sees of a study or of `fedlens cost`, at which moments; the clock is the test's."""

from __future__ import annotations

import errno
import io
import re
from typing import Any

import pytest
from rich.console import Console

from fedlens.cli.display.runs_display import RunsDisplay, outcome
from fedlens.results.rows import Row
from fedlens.studies.planned import PlannedRun

LINE = Row(
    "0f",
    "r",
    "finished",
    None,
    1,
    "test_accuracy",
    {"round": [1], "test_accuracy": [0.8], "validation_accuracy": [0.7]},
)
RUNS = [PlannedRun("fedavg", {}, {}, "final", seed, {}, f"fedavg-seed{seed}") for seed in range(5)]


class Screen:
    """A display of three runs, its clock and what is printed."""

    def __init__(self, terminal: bool = False, **how: Any) -> None:
        self.now, self.file = 100.0, io.StringIO()
        shown = Console(
            file=self.file, force_terminal=terminal, width=110, highlight=False, markup=False, emoji=False
        )
        self.display = RunsDisplay(shown, clock=lambda: self.now, beating=False, **how)
        self.display.runs_due(3, 0, 3)

    @property
    def lines(self) -> list[str]:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_a_run_of_tuning_shows_its_value_on_validation_data() -> None:
    assert outcome(LINE, "tune") == "validation accuracy 70.0 %"
    assert outcome(LINE) == outcome(LINE, "final") == "test accuracy 80.0 %"


def test_each_run_is_a_line_with_its_outcome_time_warnings_and_the_time_left() -> None:
    screen = Screen()
    display = screen.display
    display.note("said first")
    for run in RUNS[:2]:
        display.run_started(run)
    screen.now += 40.0
    display.round_done(RUNS[0], 1, 2)
    display.run_ended(RUNS[0], Row(**{**vars(LINE), "facts": {"warnings": 2}}))
    display.run_ended(
        RUNS[1], Row(**{**vars(LINE), "status": "failed", "reason": "no luck, or set local.clip_norm."})
    )
    display.run_ended(RUNS[2], LINE)
    display.round_done(RUNS[2], 1, 2)
    assert screen.lines == [
        "said first",
        "[1/3] fedavg-seed0: test accuracy 80.0 %, 40 s, 2 warnings; about 1 min 20 s left for 2 runs",
        "[2/3] fedavg-seed1: failed: no luck, or set local.clip_norm (40 s); about 20 s left for 1 run",
        "[3/3] fedavg-seed2: finished before",
    ]


@pytest.mark.parametrize("alone", [True, False])
def test_a_long_silence_is_broken_while_a_run_trains_alone(alone: bool) -> None:
    screen = Screen()
    for run in RUNS[: 1 if alone else 2]:
        screen.display.run_started(run)
    for round in range(1, 5):
        screen.now += 10.0
        screen.display.round_done(RUNS[0], round, 100)
    left = {2: "16 min 20 s", 4: "16 min"}
    said = [f"[1/3] fedavg-seed0: round {k} of 100, {left[k]} left in this run" for k in left]
    assert screen.lines == (said if alone else [])


def test_a_terminal_has_a_bar_of_the_runs_and_what_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(terminal=True)
    for run in RUNS[:4]:
        screen.display.run_started(run)
    screen.display.round_done(RUNS[0], 3, 10)
    screen.display.tick()
    assert " 0 of 3 runs" in screen.lines[-1]
    assert screen.lines[-1].endswith("fedavg-seed0 round 3 of 10  fedavg-seed1  fedavg-seed2  and 1 more")
    screen.display.run_ended(RUNS[0], LINE)
    assert "1 of 3 runs" in screen.lines[-1]
    screen.display.close()
    screen.display.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_lost_output_is_said_once_and_ends_nothing(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(terminal)

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    screen.file.write = full  # type: ignore[method-assign]
    for run in RUNS[:2]:
        screen.display.run_started(run)
        screen.display.run_ended(run, LINE)
    said = "warning: standard output cannot be written: No space left on device; the study continues without output\n"
    assert capsys.readouterr().err == said
