"""Heavy models, whose sums and states share memory: a run that is interrupted anywhere still has a whole state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment, resume
from fedlens.aggregate import mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, Client, Outcome, Payload, Request
from fedlens.core.random import Rng
from fedlens.core.tree import copied
from fedlens.engines import processes
from fedlens.engines.shared_memory import Packer
from fedlens.files import model_digest
from fedlens.local import optimizers
from fedlens.run import checkpoint, run_state, runner
from tests.unit.engines.engine_kit import fresh

pytestmark = pytest.mark.usefixtures("quick_workers")

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 8}},
    "model": {"name": "mlp"},
    "select": {"clients_per_round": 4},
    "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
    "algorithm": "fedavg",
}
ENGINES = {"inline": {"name": "inline"}, "processes": {"name": "processes", "workers": 2}}


@pytest.fixture(autouse=True)
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is heavy."""
    for module in (optimizers, processes, run_state):
        monkeypatch.setattr(module, "HEAVY", 1)


def experiment(engine: str) -> Experiment:
    return Experiment(engine=ENGINES[engine], **SETTINGS)


def bits(directory: Path) -> str:
    tree, _ = checkpoint.read_model(directory / "model.safetensors")
    return model_digest.weights_digest(tree)


def between_replies(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real, count = mean.add_reply, 0

    def broken(*args: Any, **more: Any) -> None:
        nonlocal count
        count += 1
        real(*args, **more)
        if count == 6:  # the second reply of round 2
            raise error

    monkeypatch.setattr(mean, "add_reply", broken)


def in_the_middle_of_the_step(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    real, count = ServerSGD.step_in_place, 0

    def broken(self: ServerSGD, weights: Any, update: Any, state: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            first = next(iter(weights))
            real(self, {first: weights[first]}, {first: update[first]}, state)
            raise error
        return real(self, weights, update, state)

    monkeypatch.setattr(ServerSGD, "step_in_place", broken)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of a run that was not interrupted, with a model that is not heavy."""
    return bits(experiment("inline").run(tmp_path_factory.mktemp("whole") / "run", report=False).directory)


@pytest.mark.parametrize(
    ("engine", "where", "error"),
    [
        ("inline", between_replies, KeyboardInterrupt()),
        ("inline", in_the_middle_of_the_step, RuntimeError("the step failed")),
        ("processes", between_replies, RuntimeError("the step failed")),
        ("processes", in_the_middle_of_the_step, KeyboardInterrupt()),
    ],
)
def test_an_interrupted_run_is_resumed_to_the_same_bits(
    engine: str,
    where: Callable[[pytest.MonkeyPatch, BaseException], None],
    error: BaseException,
    whole: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as broken:
        where(broken, error)
        with pytest.raises(type(error)):
            experiment(engine).run(tmp_path / "broken", report=False)
    saved = checkpoint.load_latest(tmp_path / "broken" / "checkpoint")
    assert saved is not None
    assert saved.round == 1
    assert bits(resume(tmp_path / "broken", report=False).directory) == whole


@pytest.mark.parametrize("engine", ENGINES)
def test_no_state_changes_after_its_round(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that somebody keeps: its memory is not reused before the last of its tensors is gone."""
    kept: list[tuple[Any, Any]] = []
    real = runner.RunState

    def keeping(round: int, state: Any, *rest: Any, **more: Any) -> Any:
        kept.append((state, copied(state)))
        return real(round, state, *rest, **more)

    monkeypatch.setattr(runner, "RunState", keeping)
    experiment(engine).run(tmp_path / "run", report=False)
    assert len(kept) == 4
    for state, then in kept:
        assert all(torch.equal(value, then["model"][name]) for name, value in state["model"].items())


def echo(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Returns what it was sent, and nothing of its own."""
    return Outcome({"model": payload["model"], "pid": os.getpid()})


def test_an_ask_sends_a_placed_tree_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = processes._packed

    def packed(*args: Any, **more: Any) -> Packer:
        packer = real(*args, **more)
        if more.get("home") is not None:
            sizes.append(packer.size)
        return packer

    monkeypatch.setattr(processes, "_packed", packed)
    with fresh(ops={"work": echo}) as gate:
        engine = gate.engine
        assert isinstance(engine, processes.Processes)
        tree = {"w": torch.randn(1000), "n": torch.tensor(3)}
        placed = engine.place(tree)
        assert engine.place(placed) is placed
        for sent in (tree, placed):
            found = returned(gate, sent)
            assert all(torch.equal(one["w"], tree["w"]) and one["n"] == 3 for one in found)
        assert sizes[0] >= 4000
        assert sizes[1] == 0
        # The memory is reused once nobody has the tree, and not before.
        address, other = placed["w"].data_ptr(), engine.place({"w": torch.zeros(1000)})
        assert other["w"].data_ptr() != address
        assert torch.equal(placed["w"], tree["w"])
        del placed, found, sent
        assert engine.place({"w": torch.zeros(1000)})["w"].data_ptr() == address


def test_a_tree_that_workers_read_keeps_its_memory_whatever_becomes_of_the_mapping() -> None:
    with fresh(ops={"work": echo}) as gate:
        engine = gate.engine
        assert isinstance(engine, processes.Processes)
        shared = {"model": engine.place({"w": torch.ones(1000)})}
        address = shared["model"]["w"].data_ptr()
        answers = engine.answer(Ask("work", [Request(0)], shared, order="arrival"), 1, 0)
        shared.clear()
        assert engine.place({"w": torch.zeros(1000)})["w"].data_ptr() != address
        assert [copied(answer.payload["model"]["w"]).tolist() for answer in answers] == [[1.0] * 1000]


def returned(gate: Driver, sent: Payload) -> list[Payload]:
    def steps() -> Any:
        ask = Ask("work", [Request(k) for k in range(4)], {"model": sent})
        return [copied(answer.payload["model"]) for answer in (yield ask)]

    found: list[Payload] = gate.drive(steps(), 1)
    return found


def test_tensors_of_a_closed_engine_stay_as_they_are() -> None:
    with fresh(ops={"work": echo}) as gate:
        engine = gate.engine
        assert isinstance(engine, processes.Processes)
        placed = engine.place({"w": torch.arange(1000.0)})
    assert torch.equal(placed["w"], torch.arange(1000.0))


def test_a_partly_frozen_model_has_the_bits_of_inline(tmp_path: Path) -> None:
    """Frozen leaves stay where they were placed first, the others move with each round."""
    model = {"name": f"{__name__}:partly_frozen"}
    found = [
        bits(
            Experiment(engine=ENGINES[e], **{**SETTINGS, "model": model})
            .run(tmp_path / e, report=False)
            .directory
        )
        for e in ENGINES
    ]
    assert found[0] == found[1]


def partly_frozen(input_shape: Any, classes: int) -> torch.nn.Module:
    first = torch.nn.Linear(input_shape[-1] * input_shape[-2], 5)
    first.requires_grad_(False)
    return torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.Tanh(), torch.nn.Linear(5, classes))
