"""What a listener hears inside a round, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment
from fedlens.base.errors import ConfigError
from fedlens.core.step_counts import StepCount, Work
from fedlens.run.observer import Listening
from fedlens.run.progress import Progress, ProgressBase

LEAST: dict[str, Any] = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1, "epochs": 2},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 70}},
    "select": {"clients_per_round": 68},  # folded in blocks of two
}


class Following(ProgressBase):
    def __init__(self) -> None:
        self.phases: list[Work] = []
        self.fractions: list[float] = []
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def working(self, work: Work) -> None:
        if not self.phases or self.phases[-1] is not work:
            self.phases.append(work)
            self.fractions = []
        self.fractions.append(work.fraction)


class Four:
    """A listener of a user's own."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def started(self, plan: dict[str, Any]) -> None:
        self.heard.append("started")

    def round_done(self, metrics: dict[str, Any]) -> None:
        self.heard.append(f"round {metrics['round']}")

    def note(self, text: str) -> None:
        self.heard.append(text)

    def finished(self, summary: dict[str, Any]) -> None:
        self.heard.append("finished")


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    "engine",
    [
        {"name": "inline"},
        {"name": "vectorized", "group": 20},
        {"name": "processes", "workers": 2, "group": 20},
    ],
    ids=str,
)
def test_each_answer_of_a_round_is_counted(tmp_path: Path, engine: dict[str, Any]) -> None:
    told = Following()
    Experiment(**LEAST, engine=engine).run(tmp_path / "run", progress=told)
    named = [(work.phase, work.round, work.rounds) for work in told.phases]
    rounds = [("training", 1, 2), ("evaluating", 1, 2), ("training", 2, 2), ("evaluating", 2, 2)]
    assert named == [("evaluating", 0, 2), *rounds]
    assert all(work.answered == work.asked for work in told.phases)
    assert [work.asked for work in told.phases if work.phase == "training"] == [68, 68]
    assert told.fractions == sorted(told.fractions)
    assert told.fractions[-1] == 1.0


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_an_engine_of_this_process_counts_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    counts: list[StepCount] = []
    begin = StepCount.begin

    def noted(count: StepCount, steps: int, clients: int = 1) -> None:
        if counts and counts[-1] is count:
            assert count.done == count.steps, "the last clients took another number of steps"
        counts.append(count)
        begin(count, steps, clients)

    monkeypatch.setattr(StepCount, "begin", noted)
    Experiment(**LEAST, engine={"name": engine}).run(tmp_path / "run")
    own = max(counts, key=lambda count: count.clients)  # the others are of trials
    assert (own.clients, own.finished) == (2 * 68, 2 * 68)


def test_listening_changes_no_result(tmp_path: Path) -> None:
    def lines(name: str, progress: Progress | None) -> list[dict[str, Any]]:
        run = Experiment(**LEAST, engine="inline").run(tmp_path / name, progress=progress)
        return [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in run.metrics]

    own = Four()
    assert lines("a", None) == lines("b", Following()) == lines("c", own)
    assert own.heard == ["started", "round 0", "round 1", "round 2", "finished"]


def test_a_listener_of_four_methods_is_wrapped_and_a_problem_is_its_note() -> None:
    own = Four()
    wrapped = Listening(own)
    wrapped.working(Work())
    wrapped.problem("no page")
    assert own.heard == ["no page"]
    follows, work = Following(), Work()
    Listening(follows).working(work)
    Listening(follows).problem("no page")
    assert (follows.phases, follows.problems) == ([work], ["no page"])


def test_a_listener_that_would_never_hear_is_refused() -> None:
    class Half(Four):
        def working(self, work: Work) -> None: ...

    with pytest.raises(ConfigError, match="has 'working', which is only used if its class inherits from"):
        Listening(Half())
