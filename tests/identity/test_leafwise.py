"""Heavy models take their steps leaf by leaf: the bits are those of all at once, with one gradient there at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.engines.processes import processes
from fedlens.local import optimizers, training
from tests.contract.contract_kit import nightly_but
from tests.identity.identity_kit import (
    CLASSES,
    FEATURES,
    IN_TWO_PARTS,
    PEERS,
    course,
    model,
    parts,
    same,
    world,
)

pytestmark = pytest.mark.usefixtures("quick_workers")

SETTINGS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.5}, "fedvc": {"examples": 8}, "feddyn": {"alpha": 0.5}, "mime": {"beta": 0.5},
    "mimelite": {"beta": 0.5}, "feddane": {"mu": 0.3}, "moon": {"mu": 3.0}, "admm": {"solver": "sgd", "sigma": 0.5},
    "ceadmm": {"k_0": 2, "max_iterations": 5},
}  # fmt: skip
PLAIN = {"lr": 0.2, "epochs": 2, "batch_size": 4}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every model is heavy; how many leaves have taken a step by themselves."""
    monkeypatch.setattr(optimizers, "HEAVY", 0)
    taken: list[int] = []
    real = optimizers.Leafwise._step
    monkeypatch.setattr(optimizers.Leafwise, "_step", lambda self, p: (taken.append(1), real(self, p))[1])
    return taken


def layered(input_shape: Sequence[int], classes: int) -> nn.Module:
    """With dropout, whose masks have to be the same ones; a frozen layer; and one that nothing depends on."""
    module = nn.Sequential(
        nn.Linear(FEATURES, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, classes)
    ).double()
    module[3].requires_grad_(False)
    module.register_parameter("idle", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    return module


def both(name: str, monkeypatch: pytest.MonkeyPatch, steps: list[int], local: dict[str, Any]) -> int:
    """Holds a course leaf by leaf against one that is not; the steps that leaves took by themselves."""

    def run() -> Any:
        made = ALGORITHMS.find(name)(
            parts(
                world(),
                local,
                model(factory=layered),
                select=None if name in {"fedvc", *PEERS} else Uniform(4),
            ),
            **SETTINGS.get(name, {}),
        )
        return course(made, world(), 3).final

    leaf_by_leaf, count = run(), len(steps)
    monkeypatch.setattr(optimizers, "HEAVY", 2**60)
    assert same(run(), leaf_by_leaf)
    assert len(steps) == count
    return count


@pytest.mark.parametrize(
    "name",
    nightly_but(
        {"fedavg", "fedadam", "feddyn", "scaffold", "iceadmm", "mime", "moon"},
        sorted(set(ALGORITHMS) - IN_TWO_PARTS - {"centralized", "finetune", "fedbn", "local-only"}),
    ),
)
def test_every_algorithm_has_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    both(name, monkeypatch, steps, PLAIN | ({"epochs": 1} if name in ("iceadmm", "ceadmm", "liadmm") else {}))


@pytest.mark.parametrize(
    ("local", "spared"),
    [
        ({}, True),
        ({"momentum": 0.5}, False),
        ({"weight_decay": 0.1}, False),
        ({"clip_norm": 0.1}, False),
        ({"optimizer": "adam"}, False),
    ],
)
def test_plain_steps_alone_are_taken_so(
    local: dict[str, Any], spared: bool, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    assert (both("fedavg", monkeypatch, steps, PLAIN | local) > 0) is spared


def wide(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Heavy by itself, also in a worker, where nothing is patched: 70 MB."""
    return nn.Sequential(nn.Linear(FEATURES, 2**20), nn.Tanh(), nn.Linear(2**20, classes)).double()


def test_a_heavy_model_has_the_bits_on_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update lies in the memory of the weights, and the next client's weights are copied over it."""
    local = {"lr": 0.01, "steps": 2, "batch_size": 4}
    made = fedavg(parts(world(), local, model(factory=wide), select=Uniform(3)))
    found = [course(made, world(), 1, engine=engine).final for engine in (None, processes(workers=2))]
    monkeypatch.setattr(optimizers, "HEAVY", 2**60)
    plain = course(made, world(), 1).final
    assert all(same(plain, one) for one in found)


def test_replies_that_are_reduced_where_they_were_made_are_copies(
    monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """A hundred clients in blocks of three: the first of a block is kept while the next one's weights are loaded."""
    there = world([1 + k % 5 for k in range(100)])
    made = fedavg(parts(there, PLAIN, select=Everyone()))
    found = course(made, there, 2).final
    monkeypatch.setattr(optimizers, "HEAVY", 2**60)
    assert same(course(made, there, 2).final, found)
    assert steps


def test_one_gradient_is_there_at_a_time(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    real = optimizers.Leafwise._step

    def count(self: optimizers.Leafwise, parameter: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in self.parameters))
        real(self, parameter)

    monkeypatch.setattr(optimizers.Leafwise, "_step", count)
    course(fedavg(parts(world(), PLAIN, select=Uniform(4))), world(), 1)
    assert most == 1


class Tangled(nn.Module):
    """Its second weight is needed, past its own step, for the gradient of the first."""

    def __init__(self, how: str, classes: int) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(FEATURES, FEATURES).double()
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(FEATURES, classes).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        return self.second(x * self.second.weight.detach()[0] if self.how == "again" else x)


@pytest.mark.parametrize("how", ["again", "once"])
def test_where_a_weight_is_needed_after_its_step_all_are_taken_at_once(
    how: str, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """The client is trained again from its start, under the same dropout masks, and the others no other way."""

    def factory(input_shape: Sequence[int], classes: int) -> nn.Module:
        return Tangled(how, classes)

    forgone: list[int] = []
    real = training.forgo
    monkeypatch.setattr(training, "forgo", lambda *given: (forgone.append(1), real(*given))[1])

    def run() -> Any:
        return course(
            fedavg(parts(world(), PLAIN, model(factory=factory), select=Uniform(4))), world(), 2
        ).final

    found = run()
    assert len(forgone) == (how == "again")
    monkeypatch.setattr(optimizers, "HEAVY", 2**60)
    assert same(run(), found)


def test_what_is_wrong_with_a_model_is_told_as_ever(steps: list[int]) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *slopes: Tensor) -> Any:
            raise RuntimeError("no way back")

    def factory(input_shape: Sequence[int], classes: int) -> nn.Module:
        module = nn.Sequential(nn.Linear(FEATURES, CLASSES).double())
        forward: Callable[..., Tensor] = module.forward
        module.forward = lambda x: Broken.apply(forward(x))  # type: ignore[method-assign]
        return module

    run = course(fedavg(parts(world(), PLAIN, model(factory=factory), select=Uniform(4))), world(), 1)
    assert "no way back" in str(run.steps[0].tally.failures)
