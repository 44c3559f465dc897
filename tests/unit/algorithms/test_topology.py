"""The graphs of peers: their weights, their spectral gaps in closed form, and what is refused."""

from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from fedlens.algorithms.topology import (
    Complete,
    Edges,
    ErdosRenyi,
    Exponential,
    Ring,
    Topology,
    TopologySettings,
    connected,
    second_modulus,
    without,
)
from fedlens.base.errors import ConfigError

HALF = ErdosRenyi(probability=0.5)
KINDS = [Ring(), Complete(), Exponential(), Exponential(one_peer=True), HALF]


@pytest.mark.parametrize("n", [3, 4, 7, 16])
def test_the_second_eigenvalue_of_a_ring(n: int) -> None:
    assert second_modulus(Topology(Ring(), n).weights(0)) == pytest.approx(
        (1 + 2 * cos(2 * pi / n)) / 3, abs=1e-12
    )


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("kind", [Complete(), Exponential(one_peer=True), HALF], ids=lambda kind: kind.name)
def test_what_is_drawn_are_the_weights_of_a_period(kind: Any, directed: bool) -> None:
    topology = Topology(kind, 8, directed)
    assert len(topology.drawn) == topology.period
    for mixing, graph in enumerate(topology.drawn):
        weights = topology.weights(mixing)
        drawn = np.diag(weights.diagonal())
        for sender, receiver, weight in graph.edges:
            drawn[receiver, sender] = weight
            if not graph.directed:
                drawn[sender, receiver] = weight
        assert np.array_equal(drawn, weights)


def test_what_is_drawn_of_redrawn_and_of_large_graphs() -> None:
    (first,) = Topology(ErdosRenyi(probability=0.5, redraw=True), 5).drawn
    assert first.title == "In the first mixing; each mixing draws another graph"
    (large,) = Topology(Complete(), 101).drawn
    assert large.title == "In each mixing: 5,050 edges, too many to draw"
    assert not large.edges


@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_the_second_eigenvalues_of_exponential_graphs(m: int) -> None:
    directed, undirected = (Topology(Exponential(), 2**m, directed) for directed in (True, False))
    assert second_modulus(directed.weights(0)) == pytest.approx((m - 1) / (m + 1), abs=1e-7)
    assert second_modulus(undirected.weights(0)) == pytest.approx((m - 2) / m, abs=1e-7)
    assert undirected.spectral_gap() == pytest.approx(2 / m, abs=1e-7)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("n", [2, 8, 16])
def test_one_peer_families_agree_after_a_period(n: int, directed: bool) -> None:
    topology = Topology(Exponential(one_peer=True), n, directed)
    x = np.random.default_rng(0).normal(size=(n, 3))
    mixed = x
    for mixing in range(topology.period):
        assert {len(others) for others in topology.neighbours(mixing)} == {1}
        mixed = topology.weights(mixing) @ mixed
    assert 2**topology.period == n
    np.testing.assert_allclose(mixed, np.broadcast_to(x.mean(0), x.shape), atol=1e-12)
    assert topology.spectral_gap() == pytest.approx(1, abs=1e-7)
    # The next period begins with the first neighbour again.
    assert topology.neighbours(topology.period) == topology.neighbours(0)


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.name)
def test_weights_keep_the_sum_of_what_is_mixed(settings: TopologySettings) -> None:
    for mixing, directed in [(0, False), (1, False), (0, True), (1, True)]:
        topology = Topology(settings, 8, directed)
        weights, sent = topology.weights(mixing), topology.neighbours(mixing)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-15)
        received = [{i for i in range(8) if i != j and weights[i, j]} for j in range(8)]
        assert received == [set(others) for others in sent]
        if not directed:
            np.testing.assert_array_equal(weights, weights.T)


def test_edges_of_unequal_degrees_have_metropolis_weights(tmp_path: Path) -> None:
    (tmp_path / "star.csv").write_text("0,1\n0, 2\n\n0,3\n")
    weights = Topology(Edges(file=str(tmp_path / "star.csv")), 4).weights(0)
    np.testing.assert_allclose(weights[0], 1 / 4)
    np.testing.assert_allclose(weights[1], [1 / 4, 3 / 4, 0, 0])


def test_a_directed_edge_goes_from_its_first_end_to_its_second(tmp_path: Path) -> None:
    (tmp_path / "circle.csv").write_text("0,1\n1,2\n2,0\n0,2\n")
    topology = Topology(Edges(file=str(tmp_path / "circle.csv")), 3, directed=True)
    assert topology.neighbours(0) == [(1, 2), (2,), (0,)]
    np.testing.assert_allclose(
        topology.weights(0), [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    )


@pytest.mark.parametrize("directed", [False, True])
def test_the_weight_of_an_edge_to_a_missing_peer_stays_with_its_sender(directed: bool) -> None:
    weights = Topology(Exponential(), 8, directed).weights(0)
    kept = without(weights, {6, 1})
    np.testing.assert_allclose(kept.sum(axis=0), 1, atol=1e-15)
    here = [0, 2, 3, 4, 5, 7]
    off = ~np.eye(6, dtype=bool)
    np.testing.assert_array_equal(kept[np.ix_(here, here)][off], weights[np.ix_(here, here)][off])
    for k in here:
        assert kept[k, k] == pytest.approx(weights[k, k] + weights[1, k] + weights[6, k])
    for gone in (1, 6):
        assert kept[gone].tolist() == kept[:, gone].tolist() == [float(k == gone) for k in range(8)]
    if not directed:
        np.testing.assert_array_equal(kept, kept.T)


def test_a_graph_is_drawn_once_from_the_seed_or_for_each_mixing() -> None:
    fixed, other = Topology(HALF, 12, seed=1), Topology(HALF, 12, seed=2)
    assert fixed.neighbours(0) == fixed.neighbours(5) == Topology(HALF, 12, seed=1).neighbours(0)
    assert fixed.neighbours(0) != other.neighbours(0)
    redrawn = Topology(ErdosRenyi(probability=0.1, redraw=True), 12, seed=1)
    assert redrawn.neighbours(0) != redrawn.neighbours(1)
    assert redrawn.neighbours(3) == Topology(redrawn.settings, 12, seed=1).neighbours(3)
    assert not all(connected(redrawn.graph(mixing)) for mixing in range(5))  # which is allowed


def test_the_probability_is_the_share_of_pairs_that_are_joined() -> None:
    topology = Topology(ErdosRenyi(probability=0.3, redraw=True), 20)
    edges = sum(topology.graph(mixing).number_of_edges() for mixing in range(100))
    assert edges / (100 * 190) == pytest.approx(0.3, abs=0.015)


def test_the_gap_of_a_redrawn_graph_is_that_of_the_mean_of_the_squares() -> None:
    # With probability 1 every draw is the complete graph.
    assert Topology(ErdosRenyi(probability=1, redraw=True), 6).spectral_gap() == pytest.approx(1, abs=1e-7)
    # Of two peers: W is the mean with probability p, else the identity; so W^T W = W, and lambda_2 = 1 - p.
    two = Topology(ErdosRenyi(probability=0.25, redraw=True), 2)
    drawn = sum(two.graph(mixing).number_of_edges() for mixing in range(100)) / 100
    assert two.spectral_gap() == pytest.approx(drawn, abs=1e-12)


def test_peers_that_never_hear_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("0,1\n2,3\n")
    edges = Edges(file=str(tmp_path / "e.csv"))
    with pytest.raises(ConfigError, match="the graph of the 4 peers is not connected"):
        Topology(edges, 4)
    (tmp_path / "e.csv").write_text("0,1\n1,2\n2,3\n")
    assert Topology(edges, 4).spectral_gap() > 0
    with pytest.raises(ConfigError, match="not strongly connected"):
        Topology(edges, 4, directed=True)
    with pytest.raises(ConfigError, match="not connected"):
        Topology(ErdosRenyi(probability=0.01), 20)


def test_numbers_of_peers_that_a_graph_cannot_have() -> None:
    with pytest.raises(ConfigError, match="a power of two, and is 6"):
        Topology(Exponential(one_peer=True), 6)
    assert Topology(Exponential(one_peer=True), 6, directed=True).period == 3
    with pytest.raises(ConfigError, match="nobody to mix with"):
        Topology(Ring(), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n1;2\n", "line 2 of .* is not an edge: '1;2'"),
        ("from,to\n", "line 1 of .* is not an edge"),
        ("0,1,2\n", "is not an edge"),
        ("0,-1\n", "is not an edge"),
        ("0,1\n1,1\n", "line 2 of .* joins a peer with itself"),
        ("0,4\n", "names peer 4; the 4 peers are numbered from 0"),
    ],
)
def test_files_of_edges_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Topology(Edges(file=str(tmp_path / "e.csv")), 4)


def test_a_missing_file_of_edges_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.csv"):
        Topology(Edges(file=str(tmp_path / "none.csv")), 4)


def test_a_topology_is_a_name_or_a_table() -> None:
    adapter = TypeAdapter(TopologySettings)
    assert adapter.validate_python("ring") == Ring()
    assert adapter.validate_python({"name": "exponential", "one_peer": True}) == Exponential(one_peer=True)
    for wrong in ("star", {"name": "ring", "one_peer": True}, {"name": "erdos-renyi"}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)
