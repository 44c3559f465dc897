"""DP-FTRL: the noise of prefix sums from a tree, the steps of its paper, and what a client pays for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import OnceEach
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedavgm import fedavgm
from fedlens.core.protocol import RoundContext
from fedlens.core.random import Rng
from fedlens.core.reduction import Update
from fedlens.core.states import Journal
from fedlens.privacy.settings import PrivacySettings
from fedlens.privacy.tree import NoiseTree
from tests.identity.identity_kit import SIZES, bare_client, course, model, parts, rng_of, same, world
from tests.identity.test_fedavg import SGD, bare_sgd

CLIP, Z, LR = 0.05, 0.3, 0.5
EIGHT = (*SIZES, 4, 7)


def private(sizes: tuple[int, ...], size: int, momentum: float | None = None, **changes: Any) -> Any:
    given = {"clip": CLIP, "noise_multiplier": Z, "delta": 1e-5, "noise": "seeded", "mechanism": "tree"}
    privacy = PrivacySettings(**given | changes)
    made = parts(world(sizes), SGD, select=OnceEach(size), privacy=privacy)
    return fedavg(made, lr=LR) if momentum is None else fedavgm(made, lr=LR, momentum=momentum)


class Draws:
    """Normals as unit vectors, so that noise shows what it is made of, and the first leaf and size of each node."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int]] = []

    def leaf(self, t: int) -> None:
        self._leaf, self._size = t, 1

    def __call__(self, n: int) -> Tensor:
        self.nodes.append((self._leaf - self._size + 1, self._size))
        self._size *= 2
        return torch.eye(n, dtype=torch.float64)[len(self.nodes) - 1]


@pytest.mark.parametrize("honaker", [True, False])
def test_noise_of_a_prefix_sum_is_that_of_an_estimate_from_the_nodes_with_the_variance_of_the_formula(
    honaker: bool,
) -> None:
    draws, tree, kept = Draws(), NoiseTree(0.5, 100, honaker), {}
    noise = torch.zeros(256, dtype=torch.float64)
    for t in range(1, 101):
        draws.leaf(t)
        kept, change = tree.grown(kept, t, 256, draws)
        noise = noise + change
        weights = noise / 0.5
        bits = [j for j in range(8) if t >> j & 1]
        exact = sum(1 / (2 * (1 - 2.0 ** -(j + 1))) for j in bits) if honaker else len(bits)
        assert float(weights.square().sum()) == pytest.approx(exact, rel=1e-12)
        # Each leaf so far is in the estimate once, and no later one: it is a sum over noised nodes and nothing else.
        covered = np.zeros(101)
        for weight, (first, size) in zip(weights, draws.nodes, strict=False):
            covered[first : first + size] += float(weight)
        np.testing.assert_allclose(covered[1:], np.arange(1, 101) <= t, atol=1e-12)
        if honaker and t == 15:
            assert exact == pytest.approx(2.771, abs=5e-4)  # in place of 4
    assert len(kept["nodes"]) == 3


@pytest.mark.parametrize("momentum", [None, 0.7], ids=["plain", "momentum"])
def test_the_steps_are_those_of_the_paper(momentum: float | None) -> None:
    """w_t = w_0 - gamma v_t, v_t = beta v_(t-1) + S_t; S_t goes on from the sum that the last tree ended with."""
    there, made, size = world(EIGHT), private(EIGHT, 2, momentum, restart_every=3), 2
    run = course(made, there, rounds=5)
    mechanism = made.rule.server_rules["client-privacy"].after.__self__
    w0 = run.steps[0].before["model"]

    def flat(tree: Any) -> Tensor:
        return torch.cat([tree[name].double().view(-1) for name in w0])

    exact = v = noise = torch.zeros_like(flat(w0))
    trees: dict[int, Any] = {1: {}, 4: {}}
    how: Any = {"optimizer": bare_sgd, "epochs": 2, "batch_size": 4}
    for step in run.steps:
        first, anchor = 1 if step.round < 4 else 4, step.before["model"]
        for slot, k in enumerate(step.cohort):
            update = flat(anchor) - flat(
                bare_client(model(), anchor, there.data_of(k), rng_of(step, slot), **how)
            )
            exact = exact + update * min(1.0, CLIP * (1 - 1e-6) / float(update.norm()))
        stream = mechanism._stream(RoundContext(step.round, 5, there.info, Rng((0, "round", step.round))))
        tree = NoiseTree(Z * CLIP, 99)
        trees[first], change = tree.grown(trees[first], step.round, len(exact), stream.normal)
        noise = noise + change
        v = (momentum or 0.0) * v + (exact + noise) / size
        torch.testing.assert_close(flat(step.after["model"]), flat(w0) - LR * v, rtol=1e-5, atol=1e-6)
        assert made.spent(step.after)[0]["leaf"] == step.round - first + 1


@pytest.mark.parametrize("momentum", [None, 0.7], ids=["fedavg", "fedavgm"])
def test_without_noise_and_clipping_it_is_uniform_fedavg_bit_for_bit(momentum: float | None) -> None:
    there = world()
    bare = parts(there, SGD, select=OnceEach(3), aggregate=Mean("uniform"))
    plain = fedavg(bare, lr=LR) if momentum is None else fedavgm(bare, lr=LR, momentum=momentum)
    made = private(SIZES, 3, momentum, clip=1e9, noise_multiplier=0.0)
    assert same(course(made, there).final, course(plain, there).final)


def test_a_round_that_is_repeated_starts_a_new_tree_though_the_noise_is_at_hand() -> None:
    tree, normal = NoiseTree(1.0, restart=50), torch.randn
    kept: dict[str, Any] = {}
    for round in range(1, 4):
        kept, _ = tree.grown(kept, round, 3, normal)
    assert (kept["leaf"], kept["first"]) == (3, 1)
    for round, leaf in ((3, 1), (2, 1), (4, 4), (9, 4), (50, 4), (51, 1)):  # rounds that were skipped count
        assert tree.grown(kept, round, 3, normal)[0]["leaf"] == leaf
    assert NoiseTree(2.0, restart=50).grown(kept, 4, 3, normal)[0]["leaf"] == 1  # another deviation
    assert tree.grown(kept, 4, 5, normal)[0]["leaf"] == 1  # another model


def test_the_noise_is_in_the_journal_until_the_last_round_and_never_in_a_state() -> None:
    there, made, journal = world(), private(SIZES, 1), Journal()
    after = made.rule.server_rules["client-privacy"].after
    for round in range(1, 6):
        ctx = RoundContext(round, 5, there.info, Rng((0, "round", round)), journal=journal)
        state, _ = after({"clip": CLIP}, Update({"w": torch.zeros(4)}, {}, {}, {}, 0, 0.0), ctx)
        assert state == {"clip": CLIP, "released": {"round": round, "clip": CLIP, "leaf": round}}
        assert len(journal.log_of("@server").get("nodes", ())) == (round.bit_count() if round < 5 else 0)
