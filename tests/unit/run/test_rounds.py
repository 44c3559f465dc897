"""A run as a loop in the hands of a user gives what `run` gives, bit for bit, and clients can be asked by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlens
from fedlens import Experiment, Observer, load_result, resume
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Ask, Failure, Reply, Request
from fedlens.core.tree import copied
from tests.contract.contract_kit import nightly_but
from tests.run_files import content

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6}},
    "select": {"clients_per_round": 3},
    "algorithm": "scaffold",  # server and clients keep states
    "engine": "inline",
}
ENGINES: dict[str, Any] = {
    "inline": "inline",
    "vectorized": "vectorized",
    "processes": {"name": "processes", "workers": 1},
}


def settings(engine: str, **more: Any) -> dict[str, Any]:
    return {**SETTINGS, "engine": ENGINES[engine], **more}


def outcome(directory: Path) -> dict[str, Any]:
    """The files of a run, of its checkpoints the last: a pause and `save` write more."""
    files = content(directory)
    return {name: value for name, value in files.items() if not name.startswith("checkpoint/")} | {
        name: value for name, value in files.items() if name.startswith("checkpoint/round-000004/")
    }


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loop_gives_what_run_gives_and_so_does_one_that_stops_half_way(engine: str, tmp_path: Path) -> None:
    experiment = Experiment(**settings(engine))
    experiment.run(tmp_path / "whole", report=False)
    numbers = []
    for round in experiment.rounds(tmp_path / "loop", report=False):
        numbers.append(round.number)
        torch.manual_seed(round.number)  # no random number of the loop reaches the run
        assert round.evaluate()["test_accuracy"] == round.metrics["test_accuracy"]
        assert round.evaluate({**round.state, "model": copied(round.state["model"])}) == round.evaluate()
        round.save()
    assert numbers == [0, 1, 2, 3, 4]
    for round in experiment.rounds(tmp_path / "stopped", report=False):
        if round.number == 2:
            round.stop()
    assert load_result(tmp_path / "stopped").summary["status"] == "paused"
    assert [r.number for r in fedlens.resume_rounds(tmp_path / "stopped", report=False)] == [3, 4]
    for name in ("loop", "stopped"):
        assert outcome(tmp_path / name) == outcome(tmp_path / "whole"), name


@pytest.mark.usefixtures("quick_workers")
def test_with_evaluations_beside_the_next_round_every_round_comes_once(tmp_path: Path) -> None:
    experiment = Experiment(**settings("processes", evaluation={"overlap": True}))
    experiment.run(tmp_path / "whole", report=False)
    numbers = []
    for round in experiment.rounds(tmp_path / "loop", report=False):
        numbers.append(round.number)
        assert round.evaluate()["test_loss"] == round.metrics["test_loss"]
        if round.number == 2:
            round.stop()
    assert numbers == [0, 1, 2]
    resume(tmp_path / "loop", report=False)
    names = ("metrics.jsonl", "model.safetensors")
    whole, loop = content(tmp_path / "whole"), content(tmp_path / "loop")
    assert [loop[name] for name in names] == [whole[name] for name in names]


@pytest.mark.parametrize("end", ["break", "error", "Ctrl-C"])
def test_a_loop_that_ends_early_pauses_the_run_and_is_resumed(end: str, tmp_path: Path) -> None:
    experiment = Experiment(**SETTINGS, evaluation={"every": 2})
    experiment.run(tmp_path / "whole", report=False)

    def loop() -> None:
        for round in experiment.rounds(tmp_path / "run", report=False):
            if round.number == 3:
                if end == "break":
                    break
                raise KeyboardInterrupt if end == "Ctrl-C" else ZeroDivisionError

    if end == "break":
        loop()
    else:
        with pytest.raises(KeyboardInterrupt if end == "Ctrl-C" else ZeroDivisionError):
            loop()
    summary = load_result(tmp_path / "run").summary
    assert (summary["status"], summary["rounds_done"]) == ("paused", 3)
    resume(tmp_path / "run", report=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_round_that_is_over_says_so(tmp_path: Path) -> None:
    rounds = list(Experiment(**SETTINGS).rounds(tmp_path / "run", report=False, until=1))
    assert "model" in rounds[1].state
    assert rounds[0].directory == tmp_path / "run"
    with pytest.raises(
        ConfigError, match=r"round 0 is over, and the run is at round 1 \(round 0\); keep what"
    ):
        rounds[0].evaluate()


class OwnNumber(Observer):
    def evaluated(self, round: int, state: Any, tally: Any, metrics: Any) -> dict[str, float]:
        return {"mine": 3.5 + round}


def test_a_line_that_is_written_refuses_changes_and_an_observer_makes_the_column(tmp_path: Path) -> None:
    def update(line: dict[str, Any]) -> None:
        line |= {"mine": 3.5}

    observed = Experiment(**SETTINGS, observe=[OwnNumber])
    for round in observed.rounds(tmp_path / "run", report=False, until=1):
        for change in (
            lambda line: line.__setitem__("mine", 3.5),
            lambda line: line.update(mine=3.5),
            lambda line: line.setdefault("other", 3.5),
            lambda line: line.pop("mine"),
            update,
        ):
            with pytest.raises(ConfigError, match=rf"written \(round {round.number}\); .* `evaluated`"):
                change(round.metrics)
        mine = copy.deepcopy(round.metrics)
        mine["mine"] += 1  # of a copy
        assert round.metrics["mine"] == 3.5 + round.number == mine["mine"] - 1
    assert [line["mine"] for line in load_result(tmp_path / "run").metrics] == [3.5, 4.5]


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("engine", nightly_but({"processes"}, ENGINES))
def test_an_open_run_is_asked_by_hand_and_trains_the_rounds_of_a_run(engine: str, tmp_path: Path) -> None:
    experiment = Experiment(**settings(engine))
    whole = experiment.run(tmp_path / "whole", report=False, until=2)
    states = [round.state for round in experiment.rounds(tmp_path / "loop", report=False, until=2)]
    with experiment.open() as run:
        assert list(run.clients) == list(range(6))
        first, again = run.ask("train", clients=[1, 4]), run.ask("train", clients=[4, 1])
        assert sorted(reply.client for reply in first) == [1, 4]
        assert [content_of(reply) for reply in first] == [content_of(reply) for reply in again]
        assert run.train()["examples"] == whole.metrics[1]["examples"]
        run.ask("train")  # and forgets it
        run.train()
        assert run.round == 2
        assert run.evaluate()["test_accuracy"] == whole.metrics[2]["test_accuracy"]
        for name, tensor in states[2]["model"].items():
            assert torch.equal(run.state["model"][name], tensor)
        assert run.train(clients=[3])["batches"] > 0


def content_of(reply: Any) -> Any:
    assert isinstance(reply, Reply)
    return [(name, tensor.tolist()) for name, tensor in reply.payload["update"].items()]


def test_an_ask_of_your_own_and_what_an_open_run_refuses() -> None:
    with Experiment(**SETTINGS).open() as run:
        (answer,) = run.ask(Ask("train", [Request(2)], {}))
        assert isinstance(answer, Failure)
        with pytest.raises(
            ConfigError, match=r"the round does not ask for 'trian' \(op\); did you mean 'train'"
        ):
            run.ask("trian")
        with pytest.raises(ConfigError, match=r"client 9 has .* \(clients\); .* 0, 1, 2, 3, 4, \.\.\.$"):
            run.ask("train", clients=[9])
    private = Experiment(
        **{**SETTINGS, "algorithm": "fedavg", "select": {"name": "poisson", "fraction": 0.5}},
        privacy={"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "noise": "seeded"},
    )
    with private.open() as run, pytest.raises(ConfigError, match="draws among all clients"):
        run.train(clients=[1])
