"""Several clients as one computation: every client takes exactly its own steps.

In float64 and with smooth activations what is left are the last bits, so that a wrong weight, order or mask would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.aggregate.mean import Mean
from fedlens.algorithms import ALGORITHMS
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.selecting import BySize, Everyone, Fixed, Uniform
from fedlens.core.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.core.seeding import Rng
from fedlens.engines.vectorized import Vectorized, vectorized
from fedlens.local.rules import ClientRule, Visit
from fedlens.local.together import obstacle
from tests.identity.identity_kit import CLASSES, FEATURES, Points, World, course, model, parts, same, world

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
STEPS = {"lr": 0.2, "epochs": 3, "batch_size": 4}

FAMILY: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedavgm": {}, "fedprox": {"mu": 0.5}, "fedir": {}, "fedvc": {"examples": 8},
    "fedadagrad": {}, "fedadam": {}, "fedyogi": {}, "fednova": {}, "scaffold": {}, "feddyn": {"alpha": 0.5},
    "mime": {"beta": 0.5}, "mimelite": {"beta": 0.5}, "feddane": {"mu": 0.3},
    "admm": {"solver": "sgd", "sigma": 0.5, "absent": "last"}, "liadmm": {"gradient": "training"},
}  # fmt: skip
OTHERS = {"moon", "ceadmm", "iceadmm", "fedbn", "local-only", "finetune", "centralized"}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "scaffold I": ("scaffold", {"option": "I"}),
    "feddyn by examples": ("feddyn", {"alpha": 0.5, "weighting": "examples"}),
    "mime, adam": ("mime", {"optimizer": "adam", "beta": 0.5, "eps": 0.1, "v0": 1.0}),
    "admm, equal sigmas": ("admm", {"solver": "sgd", "sigma": 0.2, "sigmas": "equal"}),
    "fedir, population": ("fedir", {"target": "population", "normalize": False}),
}
LOCAL: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.7}, "nesterov": {"momentum": 0.7, "nesterov": True}, "decay": {"weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1}, "clipped": {"clip_norm": 0.8},
    "stragglers": {"stragglers": 0.6}, "steps": {"epochs": None, "steps": 5}, "whole": {"batch_size": "all"},
    "virtual": {"examples": 4, "batch_size": 2}, "lr decay": {"lr_decay": 0.5},
}  # fmt: skip


def agree(made: Any, there: World, rounds: int = 4, group: int | None = None) -> None:
    """Models, rules' states, metrics and client states' effect over the rounds are those of one by one."""
    one = course(made, there, rounds)
    many = course(made, there, rounds, engine=Vectorized(group=group))
    for a, b in zip(one.steps, many.steps, strict=True):
        torch.testing.assert_close(dict(b.after["model"]), dict(a.after["model"]), **CLOSE)
        assert (b.cohort, b.tally.replies, b.tally.failed) == (a.cohort, a.tally.replies, a.tally.failed)
        for row, other in zip(b.tally.per_client, a.tally.per_client, strict=True):
            assert row.keys() == other.keys()
            assert row == pytest.approx(other, rel=1e-10)
    assert not same(one.final, one.steps[0].before["model"])


def test_every_algorithm_is_tried_here_or_says_why_it_cannot() -> None:
    assert FAMILY.keys() | OTHERS == set(ALGORITHMS)


@pytest.mark.parametrize("name", [*FAMILY, *MORE])
def test_it_is_the_algorithm_of_one_client_after_the_other(name: str) -> None:
    algorithm, settings = MORE.get(name, (name, FAMILY.get(name, {})))
    local = STEPS | ({"momentum": 0.4} if algorithm in ("fedavg", "scaffold", "fednova", "feddyn") else {})
    select = BySize(3) if algorithm == "fedvc" else Uniform(4)
    agree(ALGORITHMS.find(algorithm)(parts(world(), local, select=select), **settings), world())


@pytest.mark.parametrize("name", LOCAL)
def test_every_local_setting_is_each_clients_own(name: str) -> None:
    agree(fedavg(parts(world(), STEPS | LOCAL[name], select=Uniform(4))), world())


def convolutional(input_shape: Sequence[int], classes: int, *, dropout: float = 0.3) -> nn.Module:
    """Convolutions, group normalization, both kinds of dropout, a frozen layer and a shared input."""
    layers = [
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Dropout2d(dropout),
        nn.AvgPool2d(2, stride=1),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(12, classes),
    ]
    module = nn.Sequential(*layers).double()
    module[6].requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "spec",
    [
        model(dropout=0.4),
        model(frozen=True),
        model(dropout=1.0),
        model(factory=convolutional),
        model(factory=convolutional, dropout=0.0),
    ],
    ids=["dropout", "frozen", "all dropped", "convolutions", "convolutions without dropout"],
)
@pytest.mark.parametrize("name", ["fedavg", "mime", "scaffold I"])
def test_dropout_masks_frozen_layers_and_convolutions_are_each_clients_own(
    spec: ModelSpec, name: str
) -> None:
    algorithm, settings = MORE.get(name, (name, {}))
    agree(ALGORITHMS.find(algorithm)(parts(world(), STEPS, spec, select=Uniform(4)), **settings), world())


@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_the_size_of_a_group_changes_nothing_but_the_last_bits(group: int) -> None:
    agree(fedavg(parts(world(), STEPS | {"momentum": 0.5})), world(), group=group)


def test_it_repeats_to_the_bit() -> None:
    made = ALGORITHMS.find("scaffold")(parts(world(), STEPS, model(dropout=0.3), select=Uniform(4)))
    runs = [course(made, world(), engine=vectorized()) for _ in range(2)]
    assert same(*[run.final for run in runs])


def test_a_client_may_appear_twice_and_trains_on_draws_of_its_own() -> None:
    local = {"lr": 0.2, "examples": 4, "batch_size": 2}
    agree(fedavg(parts(world(), local, select=Fixed((1, 4, 1)), aggregate=Mean("uniform"))), world())


def test_a_large_cohort_is_folded_in_the_same_blocks() -> None:
    there = world([1 + k % 5 for k in range(100)])
    for group in (1, 7, 64):
        agree(
            fedavg(parts(there, {"lr": 0.2, "batch_size": 2}, select=Everyone())),
            there,
            rounds=2,
            group=group,
        )


# ---- rules of a user's own


def pulled(gradients: list[Tensor], parameters: list[Tensor], visit: Visit) -> list[Tensor]:
    """Looks at norms and batches, which are each client's: not element by element."""
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    inputs, targets = visit.batch
    last = visit.state.get("last", visit.anchor)
    mean = inputs.mean() + targets.double().mean() + len(targets)
    return [g * length + 0.1 * mean * (p - w) for g, p, w in zip(gradients, parameters, last, strict=True)]


def test_a_rule_that_looks_at_a_client_as_a_whole_is_called_client_by_client() -> None:
    rule = ClientRule(
        name="mine", grad=pulled, finish=lambda p, visit: ({}, {"last": [t.clone() for t in p]})
    )
    agree(fedavg(parts(world(), STEPS, select=Uniform(4), client=rule)), world())


# ---- failures


class Broken(Points):
    """Data that cannot be read any more after the first batch."""

    def batches(self, size: int, rng: Rng):
        stream = super().batches(size, rng)
        yield next(stream)
        raise OSError("the disk is gone")


class Absent(Points):
    """Data that are not there at all."""

    def batches(self, size: int, rng: Rng):
        raise OSError("the disk is not there")


@pytest.mark.parametrize("fault", [Broken, Absent])
def test_a_client_that_fails_takes_no_other_with_it(fault: type[Points]) -> None:
    there = world()
    bad = there.clients[4]
    broken = World((*there.clients[:4], fault(bad.inputs, bad.targets), there.clients[5]))
    made = fedavg(parts(there, STEPS, select=Fixed((0, 4, 2))))
    run = course(made, broken, engine=vectorized())
    assert [step.tally.failed for step in run.steps] == [1] * 4
    assert all("OSError: the disk is" in reason for reason in run.steps[0].tally.failures[4])
    without = course(fedavg(parts(there, STEPS, select=Fixed((0, 2)))), there)
    # The slot, and with it the order of batches, is another: only the first client is told by it.
    assert run.steps[0].tally.per_client[0] == pytest.approx(without.steps[0].tally.per_client[0])


def test_a_client_whose_weights_run_away_is_refused_and_the_others_stay() -> None:
    there = world()
    far = there.clients[4]
    wild = World((*there.clients[:4], Points(far.inputs * torch.inf, far.targets), there.clients[5]))
    made = fedavg(parts(there, STEPS, select=Fixed((0, 4, 2))))
    one, many = (course(made, wild, engine=engine) for engine in (None, vectorized()))
    torch.testing.assert_close(dict(many.final), dict(one.final), **CLOSE)
    assert [s.tally.failed for s in many.steps] == [s.tally.failed for s in one.steps] == [1] * 4


def test_where_memory_runs_out_the_group_is_halved_and_tried_again(monkeypatch) -> None:
    from fedlens.local import training

    sizes: list[int] = []
    real = training.train_together

    def scarce(train: Any, calls: Any) -> Any:
        sizes.append(len(calls))
        if len(calls) > 2:
            raise torch.OutOfMemoryError("no more")
        return real(train, calls)

    monkeypatch.setattr(training, "train_together", scarce)
    agree(fedavg(parts(world(), STEPS, select=Everyone())), world(), rounds=2)
    assert sizes == [6, 3, 2, 1, 3, 2, 1, 2, 2, 2]  # and from then on in the size that went


class Moody(nn.Module):
    """Asks what its values are, which cannot be asked of all clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out if out.sum() > 0 else 2 * out


def test_a_model_that_cannot_be_stacked_stops_the_run_with_the_reason() -> None:
    made = fedavg(parts(world(), STEPS, model(factory=lambda shape, classes: Moody())))
    with pytest.raises(ConfigError, match="cannot train this model for several clients at once") as caught:
        course(made, world(), engine=vectorized())
    assert caught.value.where == "engine.name"


# ---- what cannot be done


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (model(norm=True), "the layer '1' normalizes over the examples of a batch"),
        (
            model(
                factory=lambda shape, classes: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.AlphaDropout())
            ),
            "the layer '1' draws random numbers",
        ),
    ],
    ids=["batch norm", "alpha dropout"],
)
def test_models_that_mix_clients_are_refused_before_anything_runs(spec: ModelSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        course(fedavg(parts(world(), STEPS, spec)), world(), engine=vectorized())
    assert caught.value.where == "model"
    assert "'inline'" in caught.value.hint


def test_training_that_is_one_client_after_the_other_is_refused_with_the_reason() -> None:
    made = fedavg(parts(world(), STEPS))
    solver = ClientRule(name="s", solve=lambda visit: None)  # type: ignore[arg-type,return-value]
    looking = ClientRule(name="l", loss=lambda loss, outputs, targets, visit: loss)
    for change, said in (
        ({"rule": solver}, "'s' solves each client's problem"),
        ({"rule": looking}, "'l' looks into each client's model"),
        ({"personal": frozenset({"0.weight"})}, "the clients' own"),
        ({"keep_optimizer": True}, "the optimizer's state is kept"),
    ):
        found = obstacle(replace(made.train, **change))
        assert found is not None
        assert said in found.what
    assert obstacle(made.train) is None
