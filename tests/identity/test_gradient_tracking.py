"""Gradient tracking against its equations in NumPy's and PyTorch's plain arithmetic, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.algorithms.dsgd import dsgd
from fedlens.algorithms.gradient_tracking import gradient_tracking
from fedlens.algorithms.topology import Exponential, Ring
from fedlens.base.errors import ConfigError
from fedlens.core.tree import tree_of
from fedlens.local.settings import LocalSettings
from tests.identity.drift_kit import LINE, UNIFORM, Squares, optimum, quadratics
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


def total(peers: Peers, round: int, what: str) -> dict[str, Tensor]:
    held = [each[what] for each in peers.held[round]]
    return {n: sum(tree[n] for tree in held) for n in held[0]}


@pytest.mark.parametrize(
    "local",
    [
        {**FULL, "steps": 2, "lr_schedule": "linear", "lr_change": "step"},
        {"lr": 0.1, "epochs": 1, "batch_size": 4},
    ],
    ids=["steps", "epochs"],
)
def test_every_peer_follows_the_equation(local: dict[str, Any]) -> None:
    there, spec, settings = world(), model(), LocalSettings(**local)
    made = gradient_tracking(parts(there, local), topology=Ring())
    peers = Peers(made, there)
    found = peers.run(3)
    w, mixings = made.topology.weights(0), local.get("steps", 3)  # the largest peer has 12 examples
    x: list[Mapping[str, Tensor]] = [tree_of(spec.build())] * N
    y: list[Mapping[str, Tensor]] = []
    last: list[Mapping[str, Tensor]] = []
    for round in range(3):
        for at in range(mixings):
            own = [batch_of(there.clients[k], settings, round + 1, k, at) for k in range(N)]
            slopes = [gradient(x[k], own[k], spec) for k in range(N)]
            y = [{n: y[k][n] + slopes[k][n] - last[k][n] for n in x[k]} for k in range(N)] if y else slopes
            lr = 0.1 * (1 - (round * mixings + at) / (3 * mixings) if settings.changes_by_step else 1)
            x = mixed(w, [{n: x[k][n] - lr * y[k][n] for n in x[k]} for k in range(N)])
            y, last = mixed(w, y), slopes
        for k in range(N):
            close(found[round][k], x[k])
            close(peers.held[round][k]["tracked"], y[k])
        close(peers.states[round]["model"], {n: sum(tree[n] for tree in x) / N for n in x[0]})


def test_the_sum_of_y_is_the_sum_of_the_gradients_with_peers_missing() -> None:
    there = world()
    made = gradient_tracking(parts(there, {"lr": 0.1, "steps": 3, "batch_size": 4}))
    send, mix = made.ops["send"], made.ops["mix"]
    ops = {
        **made.ops,
        "send": Failing(Failing(send, 2, [], 5), 0, [], 8),
        "mix": Failing(Failing(mix, 4, [], 6), 1, [], 9),
    }
    peers = Peers(made, there, ops)
    peers.run(6)
    assert [tally.failed for tally in peers.tallies] == [0, 2, 2, 0, 0, 0]
    for round in range(6):
        close(total(peers, round, "tracked"), total(peers, round, "gradient"))
    apart = [peers.held[5][k]["tracked"]["0.bias"] - peers.held[5][k]["gradient"]["0.bias"] for k in range(N)]
    assert all(float(difference.abs().max()) > 1e-3 for difference in apart)


def test_without_gradients_no_model_is_lost_with_peers_missing() -> None:
    there, begin = world(), models_apart(N)
    made = gradient_tracking(parts(there, {**FULL, "steps": 8}, task=NoLoss()))
    ops = {
        **made.ops,
        "send": Failing(made.ops["send"], 2, [], 3),
        "mix": Failing(made.ops["mix"], 4, [], 6),
    }
    found = Peers(made, there, ops, begin).run(8)
    for round in range(8):
        whole = {n: sum(tree[n] for tree in begin) for n in begin[0]}
        close({n: sum(tree[n] for tree in found[round]) for n in whole}, whole)
    for k in range(N):
        close(found[-1][k], {n: t / N for n, t in whole.items()}, rtol=1e-9, atol=1e-9)


def test_on_quadratics_it_reaches_the_optimum_at_a_constant_step() -> None:
    there = quadratics()
    made = gradient_tracking(parts(there, {**FULL, "lr": 0.3, "steps": 20}, LINE, task=Squares()))
    found = Peers(made, there).run(7)[-1]
    for tree in found:
        torch.testing.assert_close(tree["weight"].T, optimum(there, UNIFORM), rtol=1e-9, atol=1e-9)


def test_the_first_mixing_is_that_of_dsgd_with_statistics_and_counters() -> None:
    there, spec = world((3, 8, 5, 4)), model(norm=True)
    local = {**FULL, "steps": 1}
    one = Peers(gradient_tracking(parts(there, local, spec)), there).run(1)[0]
    other = Peers(dsgd(parts(there, local, spec)), there).run(1)[0]
    for ours, theirs in zip(one, other, strict=True):
        close(ours, theirs)
        assert int(ours["1.num_batches_tracked"]) == 1


def test_one_peer_families_agree_after_a_period() -> None:
    there, begin = world((3, 8, 5, 4)), models_apart(4)
    made = gradient_tracking(
        parts(there, {**FULL, "steps": 2}, task=NoLoss()), topology=Exponential(one_peer=True)
    )
    for tree in Peers(made, there, begin=begin).run(1)[0]:
        close(tree, {n: sum(own[n] for own in begin) / 4 for n in tree})


def test_renumbering_the_peers_renumbers_the_result() -> None:
    there = world()
    turned = World(there.clients[1:] + there.clients[:1])  # a ring turned by one is the same ring
    one, other = (
        Peers(gradient_tracking(parts(each, {**FULL, "steps": 2})), each).run(2) for each in (there, turned)
    )
    for k in range(N):
        close(one[1][k], other[1][(k - 1) % N])


def test_data_more_than_t_edges_away_changes_no_bit_after_t_mixings() -> None:
    there = world()
    changed = World((replace(there.clients[0], inputs=there.clients[0].inputs + 1), *there.clients[1:]))
    one, other = (Peers(gradient_tracking(parts(each, FULL)), each).run(3) for each in (there, changed))
    for t in (1, 2):
        for k in range(N):
            assert same(one[t - 1][k], other[t - 1][k]) is (min(k, N - k) > t)


@pytest.mark.parametrize(
    "given", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"lr_scale": {"3": 2.0}}, {"clip_norm": 1.0}]
)
def test_settings_of_steps_that_it_does_not_take_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"'gradient-tracking' does not use local.{next(iter(given))}"):
        gradient_tracking(parts(world(), FULL | given))
