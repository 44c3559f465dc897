"""Models of peers on the server's test data (`evaluation.test_peers`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedlens.algorithms.dsgd import dsgd
from fedlens.algorithms.peer_evaluation import PeersOnTest
from fedlens.algorithms.topology import Ring
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import Client, ClientStates, Op, Outcome, Payload, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.engines.inline import inline
from fedlens.results.run import read_run
from fedlens.run.session import Session
from fedlens.settings.config import read_config
from fedlens.studies.run_cost import RunCosts
from tests.contract.contract_kit import Stopping, lines, settings
from tests.identity.identity_kit import SIZES, model, parts, world

N = len(SIZES)
LOCAL = {"lr": 0.5, "epochs": 2, "batch_size": 4}


@dataclass(frozen=True)
class Silent:
    """An operation that fails at some peers."""

    op: Op
    peers: frozenset[int]

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        if client.id in self.peers:
            raise ValueError("no answer")
        return self.op(payload, client, rng)


def evaluated(
    test_peers: Any, silent: frozenset[int] = frozenset(), rounds: int = 2, **more: Any
) -> tuple[Mapping[str, float], list[Mapping[str, Any]]]:
    """The metrics after some rounds of D-SGD, and the models of all peers."""
    there = world()
    made = dsgd(parts(there, LOCAL, test_peers=test_peers, **more), topology=Ring())
    engine, states = inline(), ClientStates()
    engine.open(Program({**made.ops, "show": Silent(made.ops["show"], silent)}, there, 0), states)
    driver = Driver(engine, states)
    state = made.init(made.parts.model, there.info)
    for round in range(1, rounds + 1):
        context = RoundContext(round, rounds, there.info, Rng((0, "round", round)))
        state = driver.drive(made.round(state, context), round)
    found = driver.drive(made.evaluate(state, context), rounds)
    return found, [(states.get(k) or {})["after"]["personal"] for k in range(N)]


def on_test(trees: list[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy and loss of each model on the test data, in plain PyTorch."""
    points, module = world().pooled(), model().build()
    rows = []
    for tree in trees:
        module.load_state_dict(dict(tree))
        with torch.no_grad():
            logits = module(points.inputs)
        right = (logits.argmax(1) == points.targets).double().mean()
        rows.append((float(right), float(nn.functional.cross_entropy(logits, points.targets))))
    accuracy, loss = np.array(rows).T
    return accuracy, loss


def test_mean_spread_and_worst_are_those_of_the_peers_own_models() -> None:
    found, trees = evaluated("all")
    for name, values in zip(("accuracy", "loss"), on_test(trees), strict=True):
        worst = values.min() if name == "accuracy" else values.max()
        assert values.std() > 1e-3  # the peers differ
        assert found[f"peers_{name}_mean"] == pytest.approx(values.mean(), rel=1e-9)
        assert found[f"peers_{name}_std"] == pytest.approx(values.std(), rel=1e-6)
        assert found[f"peers_{name}_worst"] == pytest.approx(worst, rel=1e-9)


def test_a_number_of_peers_is_drawn_once_by_the_seed() -> None:
    there = world()
    drawn = {
        seed: PeersOnTest(parts(there, LOCAL, test_peers=3, selection_seed=seed)).peers for seed in range(9)
    }
    assert all(peers == sorted(set(peers)) and len(peers) == 3 for peers in drawn.values())
    assert len({tuple(peers) for peers in drawn.values()}) > 1
    assert PeersOnTest(parts(there, LOCAL, test_peers=N)).peers == list(range(N))
    found, trees = evaluated(3, selection_seed=4)
    accuracy, _ = on_test([trees[k] for k in drawn[4]])
    assert found["peers_accuracy_mean"] == pytest.approx(accuracy.mean(), rel=1e-9)


def test_a_peer_that_does_not_answer_is_left_out() -> None:
    found, trees = evaluated("all", silent=frozenset({1, 4}))
    _, loss = on_test([trees[k] for k in range(N) if k not in (1, 4)])
    assert found["peers_loss_mean"] == pytest.approx(loss.mean(), rel=1e-9)
    with pytest.raises(RunFailed, match="no peer could be measured on the test data"):
        evaluated("all", silent=frozenset(range(N)))


def given(**evaluation: Any) -> dict[str, Any]:
    return settings("dsgd", evaluation=evaluation)


def test_a_run_measures_them_when_it_evaluates_and_changes_nothing_else(tmp_path: Path) -> None:
    plain = Experiment(**given(every=2)).run(tmp_path / "plain")
    with_peers = Experiment(**given(every=2, test_peers=2)).run(tmp_path / "peers")
    keys = {f"peers_{name}_{which}" for name in ("accuracy", "loss") for which in ("mean", "std", "worst")}
    for line in lines(with_peers):
        assert keys <= line.keys() if line["round"] % 2 == 0 else not keys & line.keys()
    without = [{k: v for k, v in line.items() if not k.startswith("peers_")} for line in lines(with_peers)]
    assert without == lines(plain)  # bytes and failures, too
    assert keys <= with_peers.summary["final"].keys()
    assert with_peers.summary["details"] == plain.summary["details"] != {}  # those of the mean model
    assert any("models of 2 peers" in sentence for sentence in with_peers.summary["disclosures"])
    curves = {curve["metric"]: curve for curve in read_run(with_peers.directory).shown["curves"]}
    assert {"peers_accuracy_mean", "peers_accuracy_worst"} <= curves["accuracy"]["lines"].keys()
    assert curves["loss"]["about"] == "the models of 2 peers on the test data"
    assert [curve["metric"] for curve in read_run(plain.directory).shown["curves"]] == ["consensus_distance"]


@pytest.mark.parametrize(("name", "directed"), [("push-sum", True), ("gradient-tracking", False)])
def test_all_algorithms_of_peers_have_it_and_show_their_graph(
    name: str, directed: bool, tmp_path: Path
) -> None:
    run = Experiment(**settings(name, rounds=1, evaluation={"test_peers": 2})).run(tmp_path / "run")
    assert "peers_loss_worst" in run.summary["final"]
    assert {graph["directed"] for graph in read_run(run.directory).shown["graphs"]} == {directed}
    assert read_run(run.directory).shown["curves"][0]["metric"] == "consensus_distance"


def test_a_stopped_run_goes_on_with_the_same_peers(tmp_path: Path) -> None:
    whole = Experiment(**given(test_peers=2)).run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        Experiment(**given(test_peers=2)).run(tmp_path / "stopped", progress=Stopping(2))
    assert lines(resume(tmp_path / "stopped")) == lines(whole)


def test_it_is_refused_without_peers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no peers with models of their own") as refused:
        Experiment(**settings("fedavg", evaluation={"test_peers": 2})).run(tmp_path / "run")
    assert refused.value.where == "evaluation.test_peers"


def test_more_peers_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="7 peers are to be measured, and there are 6"):
        Experiment(**given(test_peers=7)).run(tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_it_cannot_overlap_with_the_next_round(tmp_path: Path) -> None:
    changes = given(test_peers=2, overlap=True) | {"engine": {"name": "processes", "workers": 1}}
    with pytest.raises(ConfigError, match="an evaluation asks 5 times"):
        Experiment(**changes).run(tmp_path / "run")


def test_the_price_counts_each_tested_model() -> None:
    costs = RunCosts(Session())
    base = {"rounds": 2, "model": "linear", "local": {"lr": 0.1}, "algorithm": {"name": "dsgd"}}
    base |= {"data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}
    shapes = [
        costs._shape(each, read_config(dict(each)))
        for each in (
            base,
            base | {"evaluation": {"test_peers": 3}},
            base | {"evaluation": {"test_peers": "all"}},
        )
    ]
    evaluated = [shape.at_server + shape.at_clients for shape in shapes]
    assert evaluated == [evaluated[0], 4 * evaluated[0], 5 * evaluated[0]]
