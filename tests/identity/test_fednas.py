"""FedNAS against bare PyTorch, in float64: its steps, its halves, and the architecture that it derives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.averaging import Averaging
from fedlens.algorithms.client_sampling import Fixed
from fedlens.algorithms.fednas import fednas
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError, HookError
from fedlens.base.registry import read_settings
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import Rng
from fedlens.models.darts import ARCHITECTURE, NAMES, SearchNetwork, darts, genotype_of
from fedlens.models.registry import MODELS
from tests.identity.identity_kit import (
    CLASSES,
    EXACT,
    SIZES,
    Course,
    Points,
    World,
    close,
    course,
    mean,
    parts,
    rng_of,
    world,
)

SHAPE = (1, 8, 8)
SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01, "epochs": 1, "batch_size": 2, "clip_norm": 0.7}
ALPHA_LR, ALPHA_DECAY = 0.05, 0.1
RATES = {"alpha_lr": ALPHA_LR, "alpha_decay": ALPHA_DECAY}


def search(input_shape: Sequence[int], classes: int) -> nn.Module:
    return SearchNetwork(input_shape, classes, channels=1, cells=3, nodes=1).double()


SPEC = ModelSpec(search, "darts-search", {}, SHAPE, CLASSES, 0)


def images(sizes: Sequence[int] = SIZES) -> World:
    draw = torch.Generator().manual_seed(3)
    given = world(sizes)
    return World(
        tuple(
            Points(torch.randn(len(p), *SHAPE, generator=draw, dtype=torch.float64), p.targets)
            for p in given.clients
        )
    )


def run(
    there: World, rounds: int, cohort: Sequence[int], local: Mapping[str, Any] = SGD, **own: Any
) -> Course:
    made = parts(there, local, SPEC, select=Fixed(tuple(cohort)))
    return course(fednas(made, **{**RATES, **own}), there, rounds)


def halves_of(points: Points, client: int) -> tuple[Points, Points]:
    """Written from the documentation: the second half of a random order trains, the first validates."""
    order = torch.randperm(len(points), generator=Rng((0, "client", client)).torch("validation"))
    held = len(points) // 2
    return points.take(order[held:].sort().values), points.take(order[:held].sort().values)


def searched(
    tree: Mapping[str, Tensor], points: Points, client: int, rng: Rng, balance: float
) -> dict[str, Tensor]:
    """A client's round in bare PyTorch, with torch's own optimizers."""
    module = search(SHAPE, CLASSES)
    module.load_state_dict(dict(tree))
    train, held = halves_of(points, client)
    alphas = [module.get_parameter(name) for name in ARCHITECTURE]
    weights = [p for name, p in module.named_parameters() if name not in ARCHITECTURE]
    adam = torch.optim.Adam(alphas, lr=ALPHA_LR, betas=(0.5, 0.999), weight_decay=ALPHA_DECAY)
    sgd = torch.optim.SGD(weights, lr=SGD["lr"], momentum=SGD["momentum"], weight_decay=SGD["weight_decay"])
    steps = -(-len(train) // 2)
    others = held.batches(2, rng.child("validation"))
    for inputs, targets in islice(train.batches(2, rng), steps):
        loss = nn.functional.cross_entropy(module(inputs), targets)
        if balance:
            x, y = next(others)
            loss = loss + balance * nn.functional.cross_entropy(module(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        sgd.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        nn.utils.clip_grad_norm_(weights, SGD["clip_norm"])
        sgd.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("balance", [0.7, 0.0], ids=["both losses", "the training loss"])
def test_two_rounds_are_a_bare_loop(balance: float) -> None:
    """With two clients absent, so the weights of the others sum to 1."""
    there, cohort = images(), (0, 2, 3)
    found = run(there, 2, cohort, balance=balance)
    for step in found.steps:
        trees = [
            searched(step.before["model"], there.clients[k], k, rng_of(step, slot), balance)
            for slot, k in enumerate(cohort)
        ]
        expected = mean(trees, [len(there.clients[k]) for k in cohort])
        floats = [name for name, value in expected.items() if value.is_floating_point()]
        assert {*ARCHITECTURE} < {*floats}
        for name in floats:
            torch.testing.assert_close(step.after["model"][name], expected[name], **EXACT)


def test_one_client_is_central_search() -> None:
    """Round after round, with the same halves: what a client validates with it never trains on."""
    there = images((9,))
    found = run(there, 3, (0,))
    tree = found.steps[0].before["model"]
    for step in found.steps:
        tree = searched(tree, there.clients[0], 0, rng_of(step, 0), 1.0)
    close(
        {n: v for n, v in found.final.items() if v.is_floating_point()},
        {n: v for n, v in tree.items() if v.is_floating_point()},
        rtol=1e-9,
        atol=1e-10,  # Adam divides by small second moments
    )


def test_what_a_client_validates_with_moves_its_alphas_alone() -> None:
    """With other labels in that half, a first step changes the alphas, and the weights through them alone."""
    there, local = images((8,)), {**SGD, "epochs": None, "steps": 1, "batch_size": "all"}
    _, held = halves_of(there.clients[0], 0)
    order = torch.randperm(8, generator=Rng((0, "client", 0)).torch("validation"))[:4].sort().values
    other = there.clients[0].targets.clone()
    other[order] = (held.targets + 1) % CLASSES
    changed = World((Points(there.clients[0].inputs, other),))
    one, two = (run(which, 1, (0,), local, alpha_lr=1e-12).final for which in (there, changed))
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert {*ARCHITECTURE} <= moved
    for name in {*one} - {*ARCHITECTURE}:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-9)


def test_a_client_with_one_example_follows_the_training_loss() -> None:
    there = images((1, 6))
    found = run(there, 1, (0, 1))
    assert found.steps[0].tally.failures == {}
    assert found.steps[0].tally.clients == 2


def test_the_derivation_by_table() -> None:
    alphas = torch.full((5, 8), -1.0)
    alphas[:, NAMES.index("none")] = 9.0  # never taken
    table = {0: ("dil_conv_3x3", 2.0), 1: ("max_pool_3x3", 1.0), 2: ("sep_conv_5x5", 0.5), 3: ("skip_connect", 3.0),
             4: ("avg_pool_3x3", 0.5)}  # fmt: skip
    for edge, (name, value) in table.items():
        alphas[edge, NAMES.index(name)] = value
    even = torch.zeros(5, 8)
    found = genotype_of({"alphas_normal": alphas.repeat(1, 1), "alphas_reduce": even})
    # Node 1 may take states 0, 1 and 2: edges 2, 3 and 4. The shares of edges 2 and 4 are equal: the lower state.
    assert found["normal"] == [
        [("dil_conv_3x3", 0), ("max_pool_3x3", 1)],
        [("sep_conv_5x5", 0), ("skip_connect", 1)],
    ]
    assert found["reduce"] == [[("max_pool_3x3", 0), ("max_pool_3x3", 1)]] * 2


def test_the_share_of_none_counts_in_the_choice_of_edges() -> None:
    """Edges compete with their softmax over all operations, as in the authors' code."""
    alphas = torch.zeros(5, 8)
    alphas[2:, 4] = torch.tensor([2.0, 2.0, 2.5])
    alphas[4, NAMES.index("none")] = 5.0
    found = genotype_of(dict.fromkeys(ARCHITECTURE, alphas))
    assert [state for _, state in found["normal"][1]] == [0, 1]


def test_a_network_of_one_operation_is_the_search_network_that_is_sure() -> None:
    """A large alpha leaves one operation an edge; the derived network has the edges that it takes."""
    torch.manual_seed(0)
    whole = SearchNetwork(SHAPE, CLASSES, channels=2, cells=3, nodes=1).double()
    with torch.no_grad():
        for name in ARCHITECTURE:
            whole.get_parameter(name).copy_(torch.full((2, 8), -1e3))
            whole.get_parameter(name)[:, NAMES.index("sep_conv_3x3")] = 1e3
    made = darts(SHAPE, CLASSES, genotype=genotype_of(whole.state_dict()), channels=2, cells=3).double()  # type: ignore[arg-type]
    at, given = NAMES.index("sep_conv_3x3"), whole.state_dict()
    # cells.0.edges.1.4.2.weight of the fourth operation is cells.0.edges.1.2.weight here
    there = {n: re.sub(r"(\.edges\.\d+)\.", rf"\1.{at}.", n) for n in made.state_dict()}
    # The search's normalizations have no weights; those of a new network are 1 and 0.
    made.load_state_dict({n: given[old] for n, old in there.items() if old in given}, strict=False)
    x = torch.randn(5, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(made(x), whole(x), rtol=1e-12, atol=1e-12)


def test_a_file_of_the_algorithm_may_not_be_one_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 2}}
    for name in ("summary.json", "../genotype.json"):
        monkeypatch.setattr(Averaging, "files", lambda self, state, name=name: {name: b"{}"})
        with pytest.raises(HookError, match="a file of the run's own or no file's name"):
            Experiment(rounds=1, data=data, local={"lr": 0.1}, model="linear").run(tmp_path / name[-8:])


def test_the_run_directory_gets_the_genotype_and_another_run_trains_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {
            "dataset": {"name": "synthetic", "shape": [1, 8, 8], "train": 60, "test": 20},
            "partition": {"name": "iid", "clients": 2},
        },
        "local": {"lr": 0.05, "batch_size": 10},
    }
    model = {"name": "darts-search", "channels": 2, "cells": 3, "nodes": 2}
    found = Experiment(**settings, model=model, algorithm="fednas").run(tmp_path / "search")
    file = found.directory / "genotype.json"
    kept = json.loads(file.read_text())
    assert kept == json.loads(json.dumps(genotype_of(found.model.state_dict())))
    derived = {"name": "darts", "genotype": str(file), "channels": 2, "cells": 3}
    trained = Experiment(**settings, model=derived).run(tmp_path / "trained")
    file.unlink()  # the run keeps what the file held
    assert trained.model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize(
    ("genotype", "said"),
    [
        ("no-such.json", "the file cannot be read: No such file or directory"),
        ({"normal": [[["sep_conv_3x3", 0]]]}, "it needs the cells 'normal' and 'reduce'"),
        ({"normal": [[["sep_conv_3x3", 2]]], "reduce": [[["none", 0]]]}, "its states are 0 to 1"),
        ({"normal": [[["conv", 0]]], "reduce": [[["none", 0]]]}, "operations are none, max_pool_3x3"),
        ({"normal": [[]], "reduce": [[["none", 0]]]}, "node 0 of 'normal' has no edge"),
    ],
)
def test_a_genotype_that_is_none_is_refused(genotype: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings(MODELS.find("darts"), {"genotype": genotype}, "model")
    assert caught.value.where == "model.genotype"


def test_what_does_not_fit_is_refused() -> None:
    there = images()
    with pytest.raises(ConfigError, match="no architecture to search") as caught:
        _ = fednas(parts(world(), SGD)).ops
    assert caught.value.where == "model.name"
    frozen = replace(SPEC, prepare=lambda module, spec, initial: module.requires_grad_(False))
    with pytest.raises(ConfigError, match="freeze neither") as caught:
        _ = fednas(parts(there, SGD, frozen)).ops
    assert caught.value.where == "model.freeze"
    for local in ({"lr_scale": {"stem": 0.5}}, {"examples": 4}):
        with pytest.raises(ConfigError, match="does not use local"):
            fednas(parts(there, {**SGD, **local}, SPEC))
