from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedlens import Experiment
from fedlens.base.errors import RunFailed
from fedlens.benchmark import profile_engine, profile_rounds
from fedlens.benchmark.profile import evaluations
from fedlens.benchmark.profile_engine import PARTS, TimedEngine
from fedlens.benchmark.profile_rounds import ProfiledRounds, measure
from fedlens.core.protocol import Answer, Failure, Id, Reply
from fedlens.engines.inline import Inline
from tests.unit.benchmark.profile_kit import SMALL, built
from tests.unit.engines.engine_kit import gone_within


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, which nothing may be left of."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_time_that_an_operation_reports_is_taken_out_of_its_reply() -> None:
    seconds: dict[str, float] = defaultdict(float)
    engine = TimedEngine(Inline())
    metrics = {"loss": 2.0, "profile process": 77, "profile:forward": 0.5, "profile:client.check": 0.25}
    reply = Reply(Id(1, 0, 0), 4, {}, metrics)

    def answers() -> Generator[Answer, None, None]:
        yield reply
        yield Failure(Id(1, 0, 1), 5, "no")

    assert len(list(engine._stripped(answers(), seconds))) == 2
    assert reply.metrics == {"loss": 2.0}
    assert (seconds, engine.processes) == ({"forward": 0.5, "client.check": 0.25}, {77})


def check_adds_up(found: ProfiledRounds) -> None:
    """The parts of some rounds are their wall time, and the clock that says so is not the one that counts."""
    for spans in (found.training, found.evaluation):
        assert sum(spans.parts.values()) == pytest.approx(sum(spans.timed), rel=1e-9)
        assert len(spans.timed) == len(spans.plain)
        assert all(value >= 0 for value in spans.parts.values())
        assert spans.parts.keys() <= set(PARTS)  # each has a row of the table


class Operators(TorchDispatchMode):
    """Counts the operators of torch in this thread."""

    count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one."""
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """A clock that advances by one with each operator: its times do not depend on the machine."""
    with Operators() as counted:
        for module in (profile_engine, profile_rounds):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: counted.count))
        yield counted


@pytest.mark.parametrize("engine", ["inline", "vectorized"])
def test_the_parts_add_up_to_the_whole(engine: str, scratch: Path, operators: Operators) -> None:
    found = measure(built(f"engine.name={engine}"), 2)
    assert sum(found.training.timed) + sum(found.training.plain) < operators.count
    check_adds_up(found)
    training, measuring = found.training.parts, found.evaluation.parts
    for part in ("data", "forward", "backward", "optimizer", "client", "aggregate.server"):
        assert training[part] > 0, part
    assert "evaluation" not in training
    assert training["rule"] == training["other"] == measuring["other"] == 0  # all of a round is known by name
    assert measuring["evaluation"] > 0
    assert (found.processes, found.training.worker_parts) == (0, {})
    assert list(scratch.glob("fedlens-*")) == []  # torch makes a folder when a mode is entered


@pytest.mark.usefixtures("quick_workers")
def test_what_goes_on_in_workers_is_timed_there() -> None:
    found = measure(built("engine.name=processes", "engine.workers=2"), 2)
    check_adds_up(found)
    here, there = found.training.parts, found.training.worker_parts
    assert here.keys().isdisjoint({"forward", "backward", "data", "client"})
    assert here["engine"] > 0
    for part in ("data", "forward", "backward", "optimizer", "client"):
        assert there[part] > 0, part
    assert 1 <= found.processes <= 2
    assert sum(there.values()) < 2 * sum(here.values())
    assert set(found.evaluation.worker_parts) == {"evaluation"}


@pytest.mark.usefixtures("quick_workers")
def test_workers_that_train_groups_time_them_too() -> None:
    measured = measure(built("engine.name=processes", "engine.workers=1", "engine.group=3"), 1)
    assert measured.processes == 1
    assert measured.training.worker_parts["forward"] > 0
    assert not any(name.startswith("profile:") for tally in measured.training.tallies for name in tally.sums)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("engine", ["inline", pytest.param("vectorized", marks=pytest.mark.nightly)])
def test_what_a_rule_computes_for_itself_is_the_rules(engine: str) -> None:
    """Mime's gradients at the anchor are no passes of the training."""
    found = measure(built("algorithm.name=mime", f"engine.name={engine}"), 1)
    parts = found.training.parts
    assert parts["rule"] > 0.3 * (parts["forward"] + parts["backward"]) > 0


@pytest.mark.parametrize(
    "algorithm", [pytest.param("fedavg", marks=pytest.mark.nightly), "scaffold", "centralized"]
)
def test_the_bytes_are_those_of_a_run(algorithm: str, tmp_path: Path) -> None:
    overrides = [f"algorithm.name={algorithm}", "rounds=3", "local.epochs=1"]
    if algorithm != "centralized":
        held = [
            "data.validation=0.2",
            "data.validation_from=client",
            "evaluation.clients=4",
            "evaluation.every=2",
        ]
        overrides += [*SMALL, *held]
    Experiment.load("digits", overrides).run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    experiment = built(*overrides)
    found = measure(experiment, 1)
    (tally,) = found.training.tallies
    times = evaluations(experiment.config.rounds, experiment.config.evaluation.every)
    for way in ("bytes_down", "bytes_up"):
        round, measuring = getattr(tally, way), getattr(found.evaluation.tallies[-1], way)
        assert [line[way] for line in lines][1] in (round, round + measuring)
        assert sum(line[way] for line in lines) == 3 * round + times * measuring
        assert (round > 0) == (algorithm != "centralized")


def test_files_have_the_size_that_a_run_gives_them(tmp_path: Path) -> None:
    Experiment.load("digits", SMALL).run(tmp_path / "run")
    found = measure(built(), 1)
    tensors = 4 * 9930
    (saved,) = sorted((tmp_path / "run" / "checkpoint").iterdir())[-1:]
    real = sum(file.stat().st_size for file in saved.iterdir())
    assert tensors < found.checkpoint_bytes <= real < found.checkpoint_bytes + 3000
    written = (tmp_path / "run" / "model.safetensors").stat().st_size
    assert tensors < found.model_bytes <= written < found.model_bytes + 2000


def test_a_run_after_a_profile_is_the_run_before_it(tmp_path: Path) -> None:
    experiment = Experiment.load("digits", SMALL)
    before = dict(experiment.run(tmp_path / "before").model.state_dict())
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    measure(built(), 1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random_state)
    after = dict(experiment.run(tmp_path / "after").model.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_round_in_which_nothing_can_be_trained_ends_the_profile_as_it_ends_a_run(
    tmp_path: Path, scratch: Path
) -> None:
    with pytest.raises(RunFailed) as of_a_run:
        Experiment.load("digits", [*SMALL, "local.lr=1e30"]).run(tmp_path / "run")
    with pytest.raises(RunFailed) as of_a_profile:
        measure(built("local.lr=1e30"), 1)
    assert "NaN or Inf" in str(of_a_run.value)
    assert "NaN or Inf" in str(of_a_profile.value)
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("quick_workers")
def test_workers_are_gone_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = built("engine.name=processes", "engine.workers=2")
    pids: list[int] = []

    def breaks(self: object) -> None:
        pids.extend(experiment.engine.pids)  # type: ignore[attr-defined]
        raise RunFailed("no")

    monkeypatch.setattr(ProfiledRounds, "_file_sizes", breaks)
    with pytest.raises(RunFailed):
        measure(experiment, 1)
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert gone_within(20, pids)


def test_without_a_number_there_are_at_least_two_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_rounds, "_SECONDS", 1e-9)
    assert len(measure(built(), None).training.timed) == 2


@pytest.mark.parametrize(
    ("rounds", "every", "times"), [(1, 1, 2), (3, 1, 4), (3, 2, 3), (4, 2, 3), (3, 10, 2)]
)
def test_how_often_a_run_evaluates(rounds: int, every: int, times: int) -> None:
    assert evaluations(rounds, every) == times


def test_a_trace_of_one_round_has_its_parts(tmp_path: Path) -> None:
    measure(built(), 1, tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"data", "forward", "backward", "optimizer", "client", "aggregate.server", "aten::conv2d"} <= names
