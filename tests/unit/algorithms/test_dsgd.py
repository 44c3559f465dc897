"""What D-SGD refuses, says before its first round, and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.algorithms.dsgd import dsgd
from fedlens.algorithms.topology import Complete, Edges, ErdosRenyi, Topology, connected
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.pages.run_page import write_report
from fedlens.results.run import read_run
from fedlens.tasks.classification import Classification
from tests.contract.contract_kit import Stopping, lines, settings
from tests.identity.identity_kit import parts, world

LOCAL = {"lr": 0.1, "steps": 1, "batch_size": "all"}


class AtHome(Classification):
    """A task whose first layer stays at each client."""

    def local_leaves(self, spec: Any) -> frozenset[str]:
        return frozenset({"0.weight"})


@pytest.mark.parametrize(
    ("local", "chosen", "sentence"),
    [
        ({}, {"quasi_global": 0.9}, "replaces the momentum of sgd, and there is none"),
        ({"optimizer": "adam"}, {"quasi_global": 0.9}, "replaces the momentum of sgd"),
        ({"momentum": 0.9, "lr_scale": {"3": 2.0}}, {"quasi_global": 0.9}, "one for all leaves and steps"),
        (
            {"momentum": 0.9, "lr_schedule": "cosine", "lr_change": "step"},
            {"quasi_global": 0.9},
            "one for all leaves and steps",
        ),
    ],
)
def test_quasi_global_momentum_is_refused_where_it_means_nothing(
    local: dict[str, Any], chosen: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dsgd(parts(world(), LOCAL | local), **chosen)


def test_a_client_without_examples_cannot_be_a_peer() -> None:
    there = world()
    empty = replace(there, clients=(there.clients[0], there.clients[1].take(slice(0, 0)), there.clients[2]))
    with pytest.raises(ConfigError, match="client 1 holds no example"):
        dsgd(parts(empty, LOCAL))


def test_leaves_of_the_task_that_stay_at_home_are_refused() -> None:
    with pytest.raises(ConfigError, match="mixes whole models"):
        dsgd(parts(world(), LOCAL, task=AtHome()))


def test_peers_without_held_out_examples_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="measures each peer's model"):
        dsgd(parts(world(), LOCAL, measure_clients="all"))


@pytest.mark.parametrize(
    "changes",
    [
        {"select": {"clients_per_round": 3}}, {"aggregate": "mean"}, {"server": "sgd"}, {"client": "plain"},
        {"local": {"lr": 0.1, "epochs": 2, "stragglers": 0.5}},
    ],
    ids=["select", "aggregate", "server", "client", "stragglers"],
)  # fmt: skip
def test_tables_and_settings_that_it_does_not_use_are_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'dsgd' does not use"):
        Experiment(**settings("dsgd", **changes)).run(tmp_path / "run")


def test_the_spectral_gap_is_said_first() -> None:
    (note,) = dsgd(parts(world(), LOCAL), topology=Complete()).notes
    assert note == "the spectral gap of 6 peers is 1 (of W): 0 is never, 1 is agreement at once"
    drawn = dsgd(parts(world(), LOCAL), topology=ErdosRenyi(probability=0.5, redraw=True))
    assert "the mean of W^T W over 100 draws" in drawn.notes[0]


def test_its_page_gets_the_consensus_distance_and_the_graph(tmp_path: Path) -> None:
    result = Experiment(**settings("dsgd")).run(tmp_path / "run")
    shown = read_run(result.directory).shown
    (curve,), (graph,) = shown["curves"], shown["graphs"]
    (key,) = curve["lines"]
    found = [line[key] for line in result.metrics]
    assert found[0] == 0
    assert min(found[1:]) > 0
    assert graph["clients"] == 6
    (result.directory / "summary.json").unlink()  # as of a run that was killed
    assert "Who sends to whom" in write_report(result.directory).read_text(encoding="utf-8")
    assert {(i, j) for i, j, _ in graph["edges"]} == {(k, k + 1) for k in range(5)} | {(0, 5)}
    assert {weight for *_, weight in graph["edges"]} == {1 / 3}


def test_redrawn_graphs_that_are_not_connected_are_counted(tmp_path: Path) -> None:
    graph = {"name": "erdos-renyi", "probability": 0.3, "redraw": True}
    made = Experiment(**settings("dsgd") | {"algorithm": {"name": "dsgd", "topology": graph}})
    found = [line["disconnected_graphs"] for line in made.run(tmp_path / "run").metrics]
    same = Topology(ErdosRenyi(probability=0.3, redraw=True), 6)
    parted = [not connected(same.graph(mixing)) for mixing in range(4)]
    assert found == [sum(parted[:round]) for round in range(5)]
    assert found[-1] > 0


def test_a_run_whose_file_of_edges_was_changed_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "edges.csv"
    ring = [f"{k},{(k + 1) % 6}" for k in range(6)]
    file.write_text("\n".join(ring))
    graph = {"name": "edges", "file": str(file)}
    given = settings("dsgd") | {"algorithm": {"name": "dsgd", "topology": graph}}
    whole = Experiment(**given).run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        Experiment(**given).run(tmp_path / "stopped", progress=Stopping(2))
    file.write_text("\n".join([*ring, "0,3"]))
    with pytest.raises(RunFailed, match="are others than before round 3"):
        resume(tmp_path / "stopped")
    file.write_text("\n".join(reversed(ring)))  # the same edges
    assert lines(resume(tmp_path / "stopped")) == lines(whole)


def test_the_digest_is_of_the_edges_and_empty_without_a_file(tmp_path: Path) -> None:
    assert Topology(Complete(), 4).edges_digest == {"file": "", "sha256": ""}
    file = tmp_path / "edges.csv"
    file.write_text("0,1\n1,2\n")
    first = Topology(Edges(file=str(file)), 3).edges_digest
    file.write_text("0,1\n0,2\n")
    assert Topology(Edges(file=str(file)), 3).edges_digest != first
