"""Which engine is taken, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fedlens.algorithms import ALGORITHMS
from fedlens.api import Experiment, resume
from fedlens.engines import auto as module
from fedlens.engines.auto import Auto, auto
from fedlens.engines.inline import Inline
from fedlens.engines.vectorized import Vectorized
from fedlens.experiment.build import images_of_the_run
from fedlens.experiment.config import read_config
from fedlens.experiment.progress import Silent
from tests.contract.contract_kit import Stopping, weights
from tests.identity.identity_kit import course, model, parts, same, world

SPEEDS = {"inline": 100.0, "vectorized": 300.0, "processes": 200.0}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Trials that take as long as SPEEDS says, each on two cores; gives the engines and clients that were tried."""
    seen: list[tuple[str, int]] = []

    def time(
        self: Auto, engine: Any, trial: Any, data: Any, clients: Sequence[int]
    ) -> tuple[float, float] | None:
        name = type(engine).__name__.lower()
        seen.append((name, len(clients)))
        return (1e-3, 1e-3 * SPEEDS[name]) if SPEEDS[name] else None

    monkeypatch.setattr(Auto, "_time", time)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    return seen


def chosen(
    images: float = 1e9, cohort: int | None = 4, spec: Any = None, name: str = "fedavg"
) -> tuple[Auto, str]:
    made = ALGORITHMS.find(name)(parts(world(), {"lr": 0.1}, spec))
    engine = auto(state_memory=7)
    return engine, engine.choose(made.ops, world(), range(6), cohort, images)


@pytest.mark.parametrize("fastest", SPEEDS)
def test_the_fastest_is_taken_with_all_that_config_needs(
    fastest: str, tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEEDS, fastest, 1000.0)
    engine, said = chosen()
    assert type(engine.chosen).__name__.lower() == fastest
    assert engine.table == {
        "name": fastest, "threads": 1, "state_memory": 7, **({"workers": 2} if fastest == "processes" else {})
    }  # fmt: skip
    assert said.startswith(f"engine: {fastest} (images/s of 8 steps at some clients: ")
    assert "1,000" in said
    assert {name for name, _ in tried} == set(SPEEDS)


def test_for_a_short_run_no_workers_are_started(tried: list[tuple[str, int]]) -> None:
    engine, said = chosen(images=3000 - 1)
    assert "processes" not in said
    assert isinstance(engine.chosen, Vectorized)
    chosen(images=3000 + 1)
    assert [name for name, _ in tried].count("processes") == 1


def test_what_cannot_be_stacked_is_not_tried_stacked(tried: list[tuple[str, int]]) -> None:
    engine, said = chosen(images=0, spec=model(norm=True))
    assert engine.table["name"] == "inline"
    assert "vectorized" not in said


def test_one_client_a_round_may_have_all_threads(tried: list[tuple[str, int]]) -> None:
    _, said = chosen(cohort=1)
    assert "inline with 2 threads" in said
    assert "processes" not in said


def test_where_there_is_no_cohort_nothing_is_tried(tried: list[tuple[str, int]]) -> None:
    engine, said = chosen(cohort=None)
    assert (engine.table["name"], tried) == ("inline", [])
    assert "no cohort" in said


def test_steps_of_seconds_are_not_tried_on_every_engine(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW", 1e-4)
    engine, said = chosen()
    assert "a step takes seconds" in said
    assert engine.table["name"] == "processes"
    assert len(tried) == 1
    monkeypatch.setattr(module, "_fits", lambda op, workers: False)
    assert chosen()[0].table == {"name": "inline", "threads": 2, "state_memory": 7}


def test_where_every_trial_fails_the_run_itself_says_what_is_wrong(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEEDS, "vectorized", 0.0)
    engine, said = chosen(images=0)
    assert engine.table["name"] == "inline"
    for name in SPEEDS:
        monkeypatch.setitem(SPEEDS, name, 0.0)
    engine, said = chosen()
    assert engine.table["name"] == "inline"
    assert "did not come to an end" in said
    assert isinstance(Auto().chosen, Inline)


def test_trials_leave_nothing_behind_in_the_numbers() -> None:
    made = ALGORITHMS.find("scaffold")(parts(world(), {"lr": 0.1, "epochs": 2}))
    engine = auto()
    engine.choose(made.ops, world(), range(6), 6, 0.0)
    assert same(course(made, world(), engine=engine).final, course(made, world(), engine=engine.chosen).final)


def test_the_images_of_a_run_are_counted_as_often_as_they_are_looked_at() -> None:
    least = {"data": {"dataset": "digits", "partition": "iid"}, "model": "linear", "rounds": 10}
    for local, expected in (
        ({"epochs": 3}, 10 * 2 * 3 * 35 / 6),
        ({"steps": 5, "batch_size": 2}, 10 * 2 * 5 * 2),
        ({"epochs": 2, "examples": 8, "batch_size": 4}, 10 * 2 * 2 * 8),
    ):
        config = read_config({**least, "local": {"lr": 0.1, **local}})
        assert images_of_the_run(config, world().info, 2) == pytest.approx(expected)


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, sentence: str) -> None:
        self.said.append(sentence)


def test_the_choice_is_in_the_runs_config_and_a_resumed_run_does_not_choose_again(tmp_path) -> None:
    made = Experiment.load(
        "digits", ["model.name=linear", "rounds=3", "engine.name=auto", "checkpoint.seconds=0"]
    )
    notes = Notes()
    whole = made.run(tmp_path / "whole", progress=notes)
    assert sum(sentence.startswith("engine: ") for sentence in notes.said) == 1
    table = whole.config["engine"]
    assert table["name"] in ("inline", "vectorized")
    again = made.with_settings(*(f"engine.{key}={value}" for key, value in table.items()))
    with pytest.raises(KeyboardInterrupt):
        again.run(tmp_path / "stopped", progress=Stopping(1))
    notes = Notes()
    resumed = resume(tmp_path / "stopped", progress=notes)
    assert resumed.config["engine"] == table
    assert not any(sentence.startswith("engine: ") for sentence in notes.said)
    assert weights(resumed) == weights(whole)
