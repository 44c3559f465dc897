"""D-SGD against its equations in NumPy's and PyTorch's plain arithmetic, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.averaging import averaging
from fedlens.algorithms.client_sampling import Everyone
from fedlens.algorithms.dsgd import dsgd
from fedlens.algorithms.topology import Complete, Exponential, Ring
from fedlens.core.tree import tree_of
from tests.identity.drift_kit import LINE, Squares, optimum, quadratics
from tests.identity.identity_kit import World, close, course, model, parts, same, world
from tests.identity.peer_kit import FULL, Failing, N, Peers, gradient, mixed, stepped


@pytest.mark.parametrize("mix", ["before", "after"])
def test_every_peer_follows_the_equation(mix: Any) -> None:
    there, spec = world(), model()
    made = dsgd(parts(there, FULL), topology=Ring(), mix=mix)
    peers = Peers(made, there)
    found = peers.run(4)
    x: list[dict[str, Tensor]] = [tree_of(spec.build())] * N
    w = made.topology.weights(0)
    for round in range(4):
        z = stepped(x, there, spec, 0.1)
        if mix == "after":
            x = mixed(w, z)
        else:
            x = [{n: m[n] + (z[k][n] - x[k][n]) for n in m} for k, m in enumerate(mixed(w, x))]
        for k in range(N):
            close(found[round][k], x[k])
        mean = {n: sum(t[n] for t in x) / N for n in x[0]}
        close(peers.states[round]["model"], mean)
        square = sum(float(sum(((t[n] - mean[n]) ** 2).sum() for n in t)) for t in x) / N
        assert peers.states[round]["consensus"] == pytest.approx(square**0.5, rel=1e-9)


def test_on_a_complete_graph_every_peer_has_the_model_of_fedavg_with_uniform_weights() -> None:
    there = world()
    local = {"lr": 0.1, "epochs": 2, "batch_size": 4}
    found = Peers(dsgd(parts(there, local), topology=Complete()), there).run(3)
    fedavg = course(averaging(parts(there, local), select=Everyone(), aggregate=Mean("uniform")), there, 3)
    for round, step in enumerate(fedavg.steps):
        for k in range(N):
            close(found[round][k], step.after["model"])


def test_statistics_are_mixed_like_weights_and_counters_take_the_maximum() -> None:
    there, spec = world((3, 8, 5, 4)), model(norm=True)
    local = {"lr": 0.1, "epochs": 1, "batch_size": 2, "last_batch": "drop"}
    made = dsgd(parts(there, local, spec), topology=Complete())
    found = Peers(made, there).run(1)
    fedavg = course(
        averaging(parts(there, local, spec), select=Everyone(), aggregate=Mean("uniform")), there, 1
    )
    close(found[0][0], fedavg.final)
    assert int(found[0][0]["1.num_batches_tracked"]) == 4  # of the client with 8 examples


def test_before_and_after_give_one_mean_after_the_first_step() -> None:
    there = world()
    means = []
    for mix in ("before", "after"):
        peers = Peers(dsgd(parts(there, FULL), topology=Ring(), mix=mix), there)  # type: ignore[arg-type]
        peers.run(1)
        means.append(peers.states[0]["model"])
    close(*means)
    fedsgd = course(averaging(parts(there, FULL), select=Everyone(), aggregate=Mean("uniform")), there, 1)
    close(means[0], fedsgd.final)


def test_momentum_stays_at_the_peer_and_is_not_mixed() -> None:
    there, spec = world(), model()
    made = dsgd(parts(there, {**FULL, "momentum": 0.9}), topology=Ring())
    found = Peers(made, there).run(4)
    x: list[dict[str, Tensor]] = [tree_of(spec.build())] * N
    v = [{n: torch.zeros_like(t) for n, t in tree.items()} for tree in x]
    for round in range(4):
        slopes = [gradient(tree, there.clients[k], spec) for k, tree in enumerate(x)]
        v = [{n: 0.9 * own[n] + g[n] for n in own} for own, g in zip(v, slopes, strict=True)]
        x = mixed(
            made.topology.weights(0),
            [{n: t[n] - 0.1 * own[n] for n in t} for t, own in zip(x, v, strict=True)],
        )
        for k in range(N):
            close(found[round][k], x[k])


def test_quasi_global_momentum_is_that_of_the_models_that_were_mixed() -> None:
    there, spec = world(), model()
    made = dsgd(parts(there, {**FULL, "momentum": 0.9}), topology=Ring(), quasi_global=0.7)
    found = Peers(made, there).run(4)
    x: list[dict[str, Tensor]] = [tree_of(spec.build())] * N
    q = [{n: torch.zeros_like(t) for n, t in tree.items()} for tree in x]
    for round in range(4):
        slopes = [gradient(tree, there.clients[k], spec) for k, tree in enumerate(x)]
        z = [{n: t[n] - 0.1 * (0.9 * q[k][n] + slopes[k][n]) for n in t} for k, t in enumerate(x)]
        new = mixed(made.topology.weights(0), z)
        q = [{n: 0.7 * q[k][n] + 0.3 * (x[k][n] - new[k][n]) / 0.1 for n in q[k]} for k in range(N)]
        x = new
        for k in range(N):
            close(found[round][k], x[k])


def test_one_peer_families_agree_after_a_period() -> None:
    there = world((3, 8, 5, 4))
    made = dsgd(parts(there, FULL), topology=Exponential(one_peer=True))
    found = Peers(made, there).run(2)
    x: list[dict[str, Tensor]] = [tree_of(model().build())] * 4
    for round in range(2):
        # Peer i and i xor 2^k take the mean of their trained models.
        z = stepped(x, there, model(), 0.1)
        x = [{n: (z[k][n] + z[k ^ 2**round][n]) / 2 for n in z[k]} for k in range(4)]
        for k in range(4):
            close(found[round][k], x[k])


def test_renumbering_the_peers_renumbers_the_result() -> None:
    there = world()
    turned = World(there.clients[1:] + there.clients[:1])  # a ring turned by one is the same ring
    made = [dsgd(parts(each, FULL), topology=Ring()) for each in (there, turned)]
    one, other = (Peers(a, each).run(3) for a, each in zip(made, (there, turned), strict=True))
    for k in range(N):
        close(one[2][k], other[2][(k - 1) % N])


@pytest.mark.parametrize("mix", ["before", "after"])
def test_data_more_than_t_edges_away_changes_no_bit_after_t_mixings(mix: Any) -> None:
    there = world()
    changed = World((replace(there.clients[0], inputs=there.clients[0].inputs + 1), *there.clients[1:]))
    one, other = (
        Peers(dsgd(parts(each, FULL), topology=Ring(), mix=mix), each).run(3) for each in (there, changed)
    )
    for t in (1, 2):
        for k in range(N):
            away = min(k, N - k)
            reached = away <= (t if mix == "after" else t - 1)
            assert same(one[t - 1][k], other[t - 1][k]) is not reached


@pytest.mark.parametrize(("mix", "eta", "rounds"), [("before", 0.2, 250), ("after", 0.3, 140)])
def test_on_quadratics_it_ends_in_its_closed_form(mix: Any, eta: float, rounds: int) -> None:
    """(I - W + eta H) X = eta H b, or (I - W (I - eta H)) X = eta W H b: near the optimum, and not in it."""
    there = quadratics()
    made = dsgd(parts(there, {**FULL, "lr": eta}, LINE, task=Squares()), topology=Ring(), mix=mix)
    found = torch.cat([held["weight"].flatten() for held in Peers(made, there).run(rounds)[-1]])
    h = torch.block_diag(*(p.inputs.T @ p.inputs / len(p) for p in there.clients))
    hb = torch.cat([(p.inputs.T @ p.targets / len(p)).flatten() for p in there.clients])
    w = torch.kron(torch.tensor(made.topology.weights(0)), torch.eye(4).double())
    one = torch.eye(len(w)).double()
    if mix == "before":
        expected = torch.linalg.solve(one - w + eta * h, eta * hb)
    else:
        expected = torch.linalg.solve(one - w @ (one - eta * h), eta * w @ hb)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    best = optimum(there, [1.0] * len(there.clients)).flatten().repeat(len(there.clients))
    assert float((found - best).abs().max()) > 1e-2


def test_a_peer_that_does_not_send_is_left_out_of_the_mixing() -> None:
    there, spec = world(), model()
    made = dsgd(parts(there, FULL), topology=Ring())
    ops = {**made.ops, "send": Failing(made.ops["send"], 2, [], 2)}
    peers = Peers(made, there, ops)
    found = peers.run(3)
    w = made.topology.weights(0)
    alone = w.copy()
    alone[1, 1] += w[1, 2]
    alone[3, 3] += w[3, 2]
    alone[2], alone[:, 2] = 0, 0
    alone[2, 2] = 1
    x: list[dict[str, Tensor]] = [tree_of(spec.build())] * N
    for round, weights in enumerate([w, alone, w]):
        z = stepped(x, there, spec, 0.1)
        if round == 1:
            z[2] = x[2]
        x = mixed(weights, z)
        for k in range(N):
            close(found[round][k], x[k])
    assert peers.tallies[1].failed == 1


def test_if_a_peer_fails_in_mixing_all_go_on_from_before() -> None:
    there = world()
    made = dsgd(parts(there, {**FULL, "momentum": 0.9}), topology=Ring())
    whole = Peers(made, there).run(3)
    for gone in ([2], [2, 3]):
        calls: list[int] = []
        op = made.ops["mix"]
        failing: Any = Failing(op, 2, calls, gone[0])
        if len(gone) == 2:
            failing = Failing(failing, 4, [], 3)
        found = Peers(made, there, {**made.ops, "mix": failing}).run(3 + len(gone))
        for k in range(N):
            for lost in gone:
                assert same(found[lost - 1][k], whole[0][k])
            assert same(found[-1][k], whole[2][k])


def test_letters_to_neighbours_are_the_only_bytes_between_peers() -> None:
    there = world()
    peers = Peers(dsgd(parts(there, FULL), topology=Ring()), there)
    peers.run(1)
    size = sum(t.nbytes for t in tree_of(model().build()).values())
    tally = peers.tallies[0]
    assert tally.bytes_peer == 2 * N * size
    assert tally.bytes_up < size  # the models that are measured do not count
    assert tally.clients == N
