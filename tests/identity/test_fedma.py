"""FedMA's pass against bare PyTorch, in float64: what clients train and send, the last layer, and later rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Fixed
from fedlens.algorithms.fedma import FedMA, fedma
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import Rng
from fedlens.core.tree import tree_of
from fedlens.local.matching import UnitPrior, match_layer, narrow
from fedlens.models.prepare import Preparation
from tests.identity.identity_kit import (
    CLASSES,
    EXACT,
    FEATURES,
    Course,
    Points,
    World,
    close,
    course,
    epoch,
    parts,
    world,
)

SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01, "epochs": 1, "batch_size": 3}
COHORT = (0, 2, 4)  # of unequal sizes, with different classes
SIZES = (9, 8, 5, 1, 12, 6)


def net(input_shape: Sequence[int], classes: int) -> nn.Module:
    layers = [nn.Linear(input_shape[0], 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, classes)]
    return nn.Sequential(*layers).double()


LAYERS = ("0", "2", "4")
SPEC = ModelSpec(net, "net", {}, (FEATURES,), CLASSES, 3, Preparation())


def made(there: World, cohort: Sequence[int] = COHORT, spec: ModelSpec = SPEC, **own: Any) -> FedMA:
    return fedma(parts(there, SGD, spec, select=Fixed(tuple(cohort))), **own)


def run(there: World, rounds: int, cohort: Sequence[int] = COHORT, **own: Any) -> Course:
    return course(made(there, cohort, **own), there, rounds)


def module_of(tree: Mapping[str, Tensor]) -> nn.Module:
    sizes = [FEATURES, *(len(tree[f"{name}.weight"]) for name in LAYERS)]
    first, second, last = (nn.Linear(a, b) for a, b in pairwise(sizes))
    module = nn.Sequential(first, nn.Tanh(), second, nn.Sigmoid(), last).double()
    module.load_state_dict(dict(tree))
    return module


def trained(tree: Mapping[str, Tensor], points: Points, at: int, rng: Rng) -> dict[str, Tensor]:
    """An epoch of PyTorch's own SGD on the layers from `at` on."""
    module = module_of(tree)
    weights = [p for name in LAYERS[at:] for p in module.get_submodule(name).parameters()]
    sgd = torch.optim.SGD(weights, **{k: v for k, v in SGD.items() if k not in ("epochs", "batch_size")})
    for batch in epoch(len(points), SGD["batch_size"], rng.torch("batches")):
        sgd.zero_grad()
        nn.functional.cross_entropy(module(points.inputs[batch]), points.targets[batch]).backward()
        sgd.step()
    return tree_of(module)


def permuted_and_padded(weight: Tensor, units: Tensor, width: int) -> Tensor:
    wide = torch.zeros(len(weight), width, dtype=weight.dtype)
    for column, unit in enumerate(units.tolist()):
        wide[:, unit] = weight[:, column]
    return wide


def a_pass(
    starts: Mapping[int, Mapping[str, Tensor]],
    there: World,
    round: int,
    prior: UnitPrior,
    kept: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """One round of Algorithm 1, written from the paper around `match_layer`, which has tests of its own."""
    found: dict[str, Tensor] = {}
    trees = {k: dict(tree) for k, tree in starts.items()}
    for at, name in enumerate(LAYERS):
        for slot, k in enumerate(trees):
            # Each layer takes two exchanges: one at the clients, one at the server.
            rng = Rng((0, "op", round, 2 * at, slot, k))
            trees[k] = trained(trees[k], there.clients[k], at, rng)
        leaves = f"{name}.weight", f"{name}.bias"
        if name == LAYERS[-1]:
            counts = {k: torch.bincount(there.clients[k].targets, minlength=CLASSES) for k in trees}
            for leaf in leaves:
                rows = [
                    sum(trees[k][leaf][c] * counts[k][c] for k in trees) / sum(counts[k][c] for k in trees)
                    if any(counts[k][c] for k in trees)
                    else kept[leaf][c]  # type: ignore[index]
                    for c in range(CLASSES)
                ]
                found[leaf] = torch.stack(rows)
            return found
        layers = [{"weight": trees[k][leaves[0]], "bias": trees[k][leaves[1]]} for k in trees]
        merged, units = match_layer(layers, prior)
        behind = f"{LAYERS[at + 1]}.weight"
        for k, own in zip(trees, units, strict=True):
            trees[k][leaves[0]], trees[k][leaves[1]] = merged["weight"], merged["bias"]
            trees[k][behind] = permuted_and_padded(trees[k][behind], own, len(merged["weight"]))
        found |= {leaves[0]: merged["weight"], leaves[1]: merged["bias"]}
    raise AssertionError


def own_start(client: int) -> dict[str, Tensor]:
    """The documented draw: from the training seed and the client, whatever the round."""
    return tree_of(replace(SPEC, seed=Rng((0, "client", client)).seed("weights")).build())


@pytest.mark.parametrize("gamma", [1.0, 40.0], ids=["no growth", "growth"])
@pytest.mark.parametrize("init", ["own", "common"])
def test_two_rounds_are_passes_in_bare_pytorch(init: str, gamma: float) -> None:
    there = world(SIZES)
    found = run(there, 2, init=init, gamma=gamma)
    starts = {k: own_start(k) if init == "own" else tree_of(SPEC.build()) for k in COHORT}
    close(found.steps[0].after["model"], a_pass(starts, there, 1, UnitPrior(gamma=gamma)), **EXACT)
    state = found.steps[0].after
    grew = len(state["model"]["0.weight"]) > 6
    assert grew == (gamma > 1)
    assert state["members"] == list(COHORT)
    starts = {
        k: narrow(state["model"], LAYERS, [units[row] for units in state["units"]])
        for row, k in enumerate(COHORT)
    }
    assert all(len(tree["0.weight"]) == 6 and len(tree["2.weight"]) == 5 for tree in starts.values())
    close(found.final, a_pass(starts, there, 2, UnitPrior(gamma=gamma)), **EXACT)


def test_the_first_weights_are_of_the_seed_and_the_client() -> None:
    starts = [own_start(k) for k in COHORT]
    assert not torch.equal(starts[0]["0.weight"], starts[1]["0.weight"])
    there = world(SIZES)
    own, common = (run(there, 1, init=init).final for init in ("own", "common"))
    assert not torch.equal(own["0.weight"], common["0.weight"])


def test_one_client_comes_back_shrunk_and_trains_on_behind_it() -> None:
    there = world((9,))
    found = run(there, 1, (0,), sigma=0.5, sigma0=2.0)
    tree = trained(own_start(0), there.clients[0], 0, Rng((0, "op", 1, 0, 0, 0)))
    for leaf in ("0.weight", "0.bias"):
        torch.testing.assert_close(found.final[leaf], tree[leaf] / 1.25, **EXACT)
    assert all(torch.equal(u, torch.arange(u.shape[1])[None]) for u in found.steps[0].after["units"])


def test_a_class_that_nobody_has_keeps_its_row() -> None:
    """Of one client to the bit; with several, it is the mean of what each client's units had of it."""
    points = world((9,)).clients[0]
    there = World((Points(points.inputs, points.targets % 2),))
    found = run(there, 2, (0,))
    before = tree_of(SPEC.build())
    for leaf in ("4.weight", "4.bias"):
        assert torch.equal(found.final[leaf][2], before[leaf][2])
        assert not torch.equal(found.final[leaf][:2], before[leaf][:2])
    two = World(tuple(Points(p.inputs, p.targets % 2) for p in world((9, 8)).clients))
    found = run(two, 1, (0, 1), gamma=2.5)
    units = found.steps[0].after["units"][-1]
    assert (units.diff(dim=1) < 0).any()
    width = len(found.final["2.weight"])
    assert width > 5
    rows = [permuted_and_padded(before["4.weight"][2:], own, width) for own in units]
    torch.testing.assert_close(found.final["4.weight"][2:], (rows[0] + rows[1]) / 2, **EXACT)


def test_a_client_that_missed_a_pass_starts_from_the_units_that_most_share() -> None:
    there = world(SIZES)
    algorithm = made(there)
    first = course(algorithm, there, 1).steps[0].after
    shared = {**first, "units": [torch.tensor([[3, 1, 2], [1, 3, 4]]), torch.tensor([[0, 1], [2, 1]])]}
    assert [units.tolist() for units in algorithm._units(shared, 5)] == [[1, 3, 2], [1, 0]]
    assert [units.tolist() for units in algorithm._units(shared, 2)] == [[1, 3, 4], [2, 1]]


def failing(op: Any, client: int, layer: int) -> Any:
    def at(payload: Mapping[str, Any], visited: Any, rng: Rng) -> Any:
        if visited.id == client and payload["layer"] == layer:
            raise ValueError("gone")
        return op(payload, visited, rng)

    return at


class Failing(FedMA):
    """With clients that fail at a layer."""

    at: tuple[tuple[int, int], ...] = ()

    @property
    def ops(self) -> Mapping[str, Any]:  # type: ignore[override]
        found = dict(super().ops)
        for client, layer in self.at:
            found["train-layers"] = failing(found["train-layers"], client, layer)
        return found


def failed(there: World, rounds: int, cohort: Sequence[int], *at: tuple[int, int]) -> Course:
    algorithm = Failing(**vars(made(there, cohort)))
    object.__setattr__(algorithm, "at", at)
    return course(algorithm, there, rounds)


def test_a_client_that_misses_an_ask_is_out_until_the_next_pass() -> None:
    there = world(SIZES)
    found = failed(there, 1, COHORT, (2, 1))
    state = found.steps[0].after
    assert state["members"] == [0, 4]
    assert [tuple(units.shape) for units in state["units"]] == [(2, 6), (2, 5)]
    # What it sent before stays; the layers behind are those of the others.
    with_it = run(there, 1).final
    assert torch.equal(found.final["0.weight"], with_it["0.weight"])
    assert not torch.equal(found.final["2.weight"], with_it["2.weight"])
    (reasons,) = found.steps[0].tally.failures.values()
    assert reasons.total() == 1
    assert "gone" in next(iter(reasons))


def test_a_pass_without_a_client_left_keeps_the_network() -> None:
    there = world(SIZES)
    found = failed(there, 1, COHORT, *((k, 2) for k in COHORT))
    step = found.steps[0]
    assert step.after is step.before


def test_units_of_equal_weights_and_other_biases_keep_their_biases_in_a_pass() -> None:
    """Public code that permutes weights and leaves biases where they are fails here: sigmoids tell them apart."""
    there = world((9, 8))
    spec = replace(SPEC, factory=biased)
    algorithm = fedma(
        parts(there, {**SGD, "lr": 1e-12}, spec, select=Fixed((0, 1))), init="common", sigma0=1e9, gamma=1.0
    )
    found = course(algorithm, there, 2)
    inputs = there.clients[0].inputs
    with torch.no_grad():
        torch.testing.assert_close(module_of(found.final)(inputs), spec.build()(inputs), rtol=1e-8, atol=1e-8)


def biased(input_shape: Sequence[int], classes: int) -> nn.Module:
    module = net(input_shape, classes)
    with torch.no_grad():
        module[0].weight.fill_(0.1)
        module[0].bias.copy_(torch.arange(6) - 2.5)
    return module


def test_widths_are_measured_and_the_model_has_them() -> None:
    there = world(SIZES)
    algorithm = made(there, gamma=40.0)
    state = course(algorithm, there, 1).steps[0].after
    spec, tree = algorithm.model(state)
    assert spec.build().load_state_dict(tree)
    assert spec.varying["varied"]["prepare"] == {
        "hidden_widths": [len(tree["0.weight"]), len(tree["2.weight"])]
    }
    assert algorithm.curves[0].lines == {"units_0": "layer 0", "units_2": "layer 2"}
