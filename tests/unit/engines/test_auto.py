"""Which engine is taken, and what is said of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError
from fedlens.core.engine_base import EngineWork
from fedlens.engines import auto as module
from fedlens.engines import devices as placing
from fedlens.engines.auto import Auto, auto
from fedlens.engines.devices import GPU_CONTEXT
from fedlens.engines.inline import Inline
from fedlens.engines.registry import ENGINES as REGISTRY
from fedlens.engines.vectorized import Vectorized
from fedlens.run.build import images_of_the_run
from fedlens.run.progress import ProgressBase
from fedlens.settings.config import read_config
from tests.contract.contract_kit import Stopping, weights
from tests.identity.identity_kit import course, model, parts, same, world

SPEEDS = {"inline": 100.0, "vectorized": 300.0, "processes": 200.0, "group": 250.0, "channels_last": 10.0}
GROUPED = {"group", "channels_last"}
ENGINES = {"inline": {}, "vectorized": {}, "processes": {"workers": 2}, "group": {"workers": 2, "group": 2}}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Trials that take as long as SPEEDS says, each on two cores; gives the engines and clients that were tried."""
    seen: list[tuple[str, int]] = []

    def time(
        self: Auto, name: str, table: Any, trial: Any, work: Any, many: int
    ) -> tuple[float, float] | None:
        for setting in GROUPED & table.keys():
            name = setting
        seen.append((name, many))
        return (1e-3, 1e-3 * SPEEDS[name]) if SPEEDS[name] else None

    monkeypatch.setattr(Auto, "timed", time)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(placing, "usable_cores", lambda: 2)
    return seen


def chosen(
    images: float = 1e9, cohort: int | None = 4, spec: Any = None, name: str = "fedavg"
) -> tuple[Auto, str]:
    made = ALGORITHMS.find(name)(parts(world(), {"lr": 0.1}, spec))
    engine = auto(state_memory=7)
    return engine, engine.choose(work(made, cohort, images))


def work(made: Any, cohort: int | None = 4, images: float = 1e9) -> EngineWork:
    return EngineWork(made.ops, world(), range(6), cohort, 10, images, made.train.trial)


@pytest.mark.parametrize("fastest", ENGINES)
def test_the_fastest_is_taken_with_all_that_config_needs(
    fastest: str, tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPEEDS, fastest, 1000.0)
    engine, said = chosen()
    name = "processes" if fastest == "group" else fastest
    assert type(engine.engine).__name__.lower() == name
    full = settings_of(name)
    assert engine.table == full | {"name": name, "state_memory": 7} | ENGINES[fastest]
    assert said.startswith(f"engine: {name} (images/s of 8 steps at a few clients: ")
    assert "1,000" in said
    assert {name for name, _ in tried} == set(ENGINES)


def settings_of(name: str) -> dict[str, Any]:
    """What the engine's settings are unless they are set, as a run's config.toml has them."""
    found = {key: p.default for key, p in inspect.signature(REGISTRY.find(name)).parameters.items()}
    return {key: value for key, value in found.items() if value is not None} | {"device": "cpu"}


def test_a_model_with_convolutions_is_tried_in_the_other_layout_too(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def convolutional(shape: tuple[int, ...], classes: int) -> nn.Module:
        layers = nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, classes, 2), nn.Flatten()
        return nn.Sequential(*layers).double()

    monkeypatch.setitem(SPEEDS, "processes", 400.0)
    for speed, taken in ((10.0, "auto"), (1000.0, True)):
        monkeypatch.setitem(SPEEDS, "channels_last", speed)
        engine, said = chosen(spec=model(factory=convolutional))
        assert "processes 2 x 1, channels last" in said
        assert engine.table["channels_last"] == taken


def test_workers_are_counted_by_gpus_where_there_are_any(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "usable_cores", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(placing, "free_memory_of", lambda device: [2**33])
    monkeypatch.setitem(SPEEDS, "processes", 1000.0)
    made = ALGORITHMS.find("fedavg")(parts(world(), {"lr": 0.1}))
    engine = auto(device="cuda")
    engine.choose(work(made))
    assert engine.table["workers"] == 2


@pytest.mark.parametrize(("free", "taken"), [(2**33, {"processes", "group"}), (2 * GPU_CONTEXT, set())])
def test_workers_and_groups_are_sized_by_the_memory_of_the_gpu(
    free: int, taken: set[str], tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers do not fit where their contexts alone fill the GPU, however much memory the processor has."""
    monkeypatch.setattr(placing, "usable_cores", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(placing, "free_memory_of", lambda device: [free])
    monkeypatch.setattr(module, "free_memory", lambda: 2**62)
    made = ALGORITHMS.find("fedavg")(parts(world(), {"lr": 0.1}))
    auto(device="cuda").choose(work(made))
    assert {name for name, _ in tried} - {"inline", "vectorized"} == taken


def test_device_and_precision_are_those_asked_for() -> None:
    engine = auto(precision="bf16")
    made = ALGORITHMS.find("fedavg")(parts(world(), {"lr": 0.1}))
    engine.choose(work(made, images=0.0))
    assert engine.table["precision"] == engine.engine.computing.precision == "bf16"
    with pytest.raises(ConfigError, match="finds no GPU"):
        auto(device="cuda:99").check(made.ops)


def test_for_a_short_run_no_workers_are_started(tried: list[tuple[str, int]]) -> None:
    engine, said = chosen(images=3000 - 1)
    assert "processes" not in said
    assert isinstance(engine.engine, Vectorized)
    chosen(images=3000 + 1)
    assert [name for name, _ in tried].count("processes") == 1
    assert [name for name, _ in tried].count("group") == 1


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
    assert "several clients to train together" in said


def test_steps_of_seconds_are_not_tried_on_every_engine(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW", 1e-4)
    engine, said = chosen()
    assert "a step takes seconds" in said
    assert engine.table["name"] == "processes"
    assert len(tried) == 1
    monkeypatch.setattr(module, "_fits", lambda op, device, workers: False)
    assert chosen()[0].table == settings_of("inline") | {"name": "inline", "threads": 2, "state_memory": 7}


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
    assert "did not finish" in said
    assert isinstance(Auto().engine, Inline)


def test_trials_leave_nothing_behind_in_the_numbers() -> None:
    made = ALGORITHMS.find("scaffold")(parts(world(), {"lr": 0.1, "epochs": 2}))
    engine = auto()
    engine.choose(work(made, 6, 0.0))
    assert same(course(made, world(), engine=engine).final, course(made, world(), engine=engine.engine).final)


def test_the_images_of_a_run_are_counted_as_often_as_they_are_looked_at() -> None:
    least = {"data": {"dataset": "digits", "partition": "iid"}, "model": "linear", "rounds": 10}
    for local, expected in (
        ({"epochs": 3}, 10 * 2 * 3 * 35 / 6),
        ({"steps": 5, "batch_size": 2}, 10 * 2 * 5 * 2),
        ({"epochs": 2, "examples": 8, "batch_size": 4}, 10 * 2 * 2 * 8),
    ):
        config = read_config({**least, "local": {"lr": 0.1, **local}})
        assert images_of_the_run(config, world().info, 2) == pytest.approx(expected)


class Notes(ProgressBase):
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
