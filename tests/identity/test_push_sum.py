"""Push-sum against its equations in NumPy's and PyTorch's plain arithmetic, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.algorithms.dsgd import dsgd
from fedlens.algorithms.push_sum import push_sum
from fedlens.algorithms.topology import Edges, Exponential, Ring
from fedlens.core.schema import tensors_in
from fedlens.core.tree import tree_of
from fedlens.local.settings import LocalSettings
from tests.identity.identity_kit import World, close, model, parts, same, world
from tests.identity.peer_kit import (
    FULL,
    Failing,
    N,
    NoLoss,
    Peers,
    batch_of,
    gradient,
    mixed,
    models_apart,
)

# One way each, so that out-degrees differ and no mass stays 1.
ONE_WAY = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 2), (0, 3), (4, 1)]


@pytest.fixture
def graph(tmp_path: Path) -> Edges:
    return edges(tmp_path / "edges.csv", ONE_WAY)


def edges(file: Path, pairs: list[tuple[int, int]]) -> Edges:
    file.write_text("\n".join(f"{i},{j}" for i, j in pairs))
    return Edges(file=str(file))


def masses(peers: Peers, round: int) -> np.ndarray:
    return np.array([held["mass"] for held in peers.held[round]])


def total(peers: Peers, found: list[list[dict[str, Tensor]]], round: int) -> dict[str, Tensor]:
    """sum x: the models times their masses."""
    weights, models = masses(peers, round), found[round]
    return {n: sum(float(w) * m[n] for w, m in zip(weights, models, strict=True)) for n in models[0]}


@pytest.mark.parametrize(
    "local",
    [
        {**FULL, "steps": 2},
        {**FULL, "steps": 2, "momentum": 0.9, "lr_schedule": "linear", "lr_change": "step"},
        {"lr": 0.1, "epochs": 1, "batch_size": 4},
    ],
    ids=["steps", "momentum", "epochs"],
)
def test_every_peer_follows_the_equation(local: dict[str, Any], graph: Edges) -> None:
    there, spec, settings = world(), model(), LocalSettings(**local)
    made = push_sum(parts(there, local), topology=graph)
    peers = Peers(made, there)
    found = peers.run(3)
    mixings = local.get("steps", 3)  # the largest peer has 12 examples
    a = made.topology.weights(0)
    np.testing.assert_allclose(a.sum(0), 1)
    x: list[Mapping[str, Tensor]] = [tree_of(spec.build())] * N
    w, v = np.ones(N), [dict.fromkeys(x[0], 0.0)] * N
    for round in range(3):
        for at in range(mixings):
            z = [{n: t / float(m) for n, t in tree.items()} for tree, m in zip(x, w, strict=True)]
            own = [batch_of(there.clients[k], settings, round + 1, k, at) for k in range(N)]
            slopes = [gradient(z[k], own[k], spec) for k in range(N)]
            v = [{n: settings.momentum * v[k][n] + slopes[k][n] for n in v[k]} for k in range(N)]
            lr = 0.1 * (1 - (round * mixings + at) / (3 * mixings) if settings.changes_by_step else 1)
            x = mixed(a, [{n: x[k][n] - lr * v[k][n] for n in x[k]} for k in range(N)])
            w = a @ w
        np.testing.assert_allclose(masses(peers, round), w, rtol=1e-12)
        for k in range(N):
            close(found[round][k], {n: t / float(w[k]) for n, t in x[k].items()})
        mean = {n: sum(tree[n] for tree in x) / float(w.sum()) for n in x[0]}
        close(peers.states[round]["model"], mean)
        apart = [sum(((t - mean[n]) ** 2).sum() for n, t in tree.items()) for tree in found[round]]
        expected = (float(sum(m * float(d) for m, d in zip(w, apart, strict=True))) / N) ** 0.5
        assert peers.states[round]["consensus"] == pytest.approx(expected, rel=1e-9)
    assert abs(w - 1).max() > 0.3


def test_no_mass_and_no_model_is_lost_with_peers_missing_in_sending_or_in_mixing(graph: Edges) -> None:
    there, begin = world(), models_apart(N)
    made = push_sum(parts(there, {**FULL, "steps": 8}, task=NoLoss()), topology=graph)
    send, mix = made.ops["send"], made.ops["mix"]
    ops = {
        **made.ops,
        "send": Failing(Failing(send, 2, [], 3), 0, [], 9),
        "mix": Failing(Failing(mix, 4, [], 6), 1, [], 11),
    }
    peers = Peers(made, there, ops, begin)
    found = peers.run(10)
    assert [tally.failed for tally in peers.tallies[:3]] == [2, 2, 0]
    whole = {n: sum(tree[n] for tree in begin) for n in begin[0]}
    for round in range(10):
        assert masses(peers, round).sum() == pytest.approx(N, rel=1e-12)
        close(total(peers, found, round), whole)
    assert abs(masses(peers, 9) - 1).max() > 0.3
    for k in range(N):  # and all agree on the mean of the first models
        close(found[-1][k], {n: t / N for n, t in whole.items()}, rtol=1e-9, atol=1e-10)


def test_statistics_count_by_mass_and_counters_take_the_maximum(graph: Edges) -> None:
    there, spec = world((3, 8, 5, 4, 12, 6)), model(norm=True)
    made = push_sum(parts(there, {**FULL, "steps": 2, "lr": 1e-30}, spec), topology=graph)
    found = Peers(made, there).run(1)[0]
    a, name = made.topology.weights(0), "1.running_mean"
    x, w, tree = [torch.zeros(5).double()] * N, np.ones(N), tree_of(spec.build())
    for _ in range(2):
        # Weights stay, so each batch has the same mean, and 0.1 of it comes to nine tenths of the statistic.
        means = [first_layer(tree, points.inputs).mean(0) for points in there.clients]
        b = [0.9 * x[k] / float(w[k]) + 0.1 * means[k] for k in range(N)]
        x = [sum(float(a[i, j] * w[j]) * b[j] for j in range(N)) for i in range(N)]  # type: ignore[misc]
        w = a @ w
    for k in range(N):
        torch.testing.assert_close(found[k][name], x[k] / float(w[k]), rtol=1e-12, atol=1e-13)
        assert int(found[k]["1.num_batches_tracked"]) == 2


def first_layer(tree: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    return inputs @ tree["0.weight"].T + tree["0.bias"]


def test_on_a_symmetric_graph_it_is_dsgd_that_mixes_after_training() -> None:
    there = world()
    one = Peers(push_sum(parts(there, {**FULL, "steps": 1}), topology=Ring()), there)
    other = Peers(dsgd(parts(there, FULL), topology=Ring(), mix="after"), there)
    for ours, theirs in zip(one.run(4), other.run(4), strict=True):
        for k in range(N):
            close(ours[k], theirs[k])
    np.testing.assert_allclose(masses(one, 3), 1, rtol=1e-12)


def test_one_peer_families_agree_after_a_period() -> None:
    sizes = (3, 8, 5, 4, 6, 2, 7, 3)
    there, begin = world(sizes), models_apart(8)
    one_peer = Exponential(one_peer=True)
    made = push_sum(parts(there, {**FULL, "steps": 3}, task=NoLoss()), topology=one_peer)
    found = Peers(made, there, begin=begin).run(1)[0]
    for tree in found:
        close(tree, {n: sum(own[n] for own in begin) / 8 for n in tree})


def test_renumbering_the_peers_renumbers_the_result(graph: Edges, tmp_path: Path) -> None:
    there, turn = world(), [3, 0, 5, 1, 4, 2]  # peer k is number turn[k]
    turned = World(tuple(there.clients[turn.index(k)] for k in range(N)))
    other = edges(tmp_path / "turned.csv", [(turn[i], turn[j]) for i, j in ONE_WAY])
    local = {**FULL, "steps": 2}
    made = push_sum(parts(there, local), topology=graph), push_sum(parts(turned, local), topology=other)
    ours, theirs = (Peers(a, each).run(2)[1] for a, each in zip(made, (there, turned), strict=True))
    for k in range(N):
        close(ours[k], theirs[turn[k]])


def test_data_more_than_t_edges_away_changes_no_bit_after_t_mixings(graph: Edges) -> None:
    there = world()
    changed = World((replace(there.clients[0], inputs=there.clients[0].inputs + 1), *there.clients[1:]))
    one, other = (
        Peers(push_sum(parts(each, FULL), topology=graph), each).run(3) for each in (there, changed)
    )
    away = nx.single_source_shortest_path_length(nx.DiGraph(ONE_WAY), 0)
    assert max(away.values()) == 3
    for t in (1, 2, 3):
        for k in range(N):
            assert same(one[t - 1][k], other[t - 1][k]) is (away[k] > t)


# -- faults of public code ----------------------------------------------------------------------------------------


def test_mixing_does_not_change_what_neighbours_still_read(graph: Edges) -> None:
    """Public code mixes in the memory of the model that it sends, and neighbours that are slower read the mixed one."""
    there = world()
    made = push_sum(parts(there, FULL), topology=graph)
    mix, kept = made.ops["mix"], list[tuple[Tensor, Tensor]]()

    def watched(payload: Any, client: Any, rng: Any) -> Any:
        read = [*tensors_in([payload["letters"]]), *tensors_in([client.state])]
        kept.extend((tensor, tensor.clone()) for tensor in read)
        return mix(payload, client, rng)

    Peers(made, there, {**made.ops, "mix": watched}).run(3)
    assert len(kept) > 100
    assert all(torch.equal(now, then) for now, then in kept)


def test_no_two_peers_share_the_memory_of_a_model(graph: Edges) -> None:
    """Public code gives one model object to all simulated peers, which then train it in turn."""
    there = world()
    peers = Peers(push_sum(parts(there, FULL), topology=graph), there)
    found = peers.run(2)
    places = [tensor.data_ptr() for tree in found[1] for tensor in tree.values()]
    assert len(set(places)) == len(places)
    assert not any(same(found[1][k], found[1][j]) for k in range(N) for j in range(k))
