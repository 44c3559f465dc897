"""What may be trained for several clients at once, and what a trial of two finds in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.moon import moon
from fedlens.core.protocol import ModelSpec
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples
from fedlens.local.rules import ClientRule, LocalContext, ServerRule, Traits
from fedlens.local.training import Train
from fedlens.local.vectorized import steps as stacked_steps
from fedlens.local.vectorized import trial as stackable_trial
from fedlens.local.vectorized.batched_train import obstacle
from fedlens.local.vectorized.trial import Obstacle
from fedlens.tasks.classification import Classification
from tests.identity.identity_kit import model, parts, world
from tests.unit.local.models_kit import BUILT_IN, built_in

CPU = torch.device("cpu")


def trained(spec: ModelSpec, rule: ClientRule | None = None, **local: Any) -> Train:
    given = parts(world(), {"lr": 0.1} | local, spec, **({} if rule is None else {"client": rule}))
    return fedavg(given).train


@pytest.mark.parametrize("seeds", [[0], pytest.param(range(1, 5), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("name", BUILT_IN)
def test_no_built_in_model_is_refused_for_its_seed(name: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        assert obstacle(trained(built_in(name, seed))) is None


class Insisting(nn.Module):
    """Computes in float32 whatever comes, and may mix the examples of a batch."""

    def __init__(self, mixing: float) -> None:
        super().__init__()
        self.mixing, self.layer = mixing, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() @ torch.eye(4)
        out: Tensor = self.layer(x - self.mixing * x.mean(0))
        return out


def test_a_model_that_does_not_run_in_float64_is_tried_as_it_is() -> None:
    for mixing in (0.0, 0.2):
        spec = ModelSpec(lambda shape, classes, m=mixing: Insisting(m), "insisting", {}, (4,), 3, 0)
        assert (obstacle(trained(spec)) is None) == (not mixing)


class Tokens(nn.Module):
    """Its last linear layer sees two rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.reshape(-1, 2)))).view(len(x), 2, 3).mean(1)


def test_features_are_tried_where_the_rule_looks_at_any() -> None:
    spec = ModelSpec(lambda shape, classes: Tokens(), "tokens", {}, (4,), 3, 0)
    assert obstacle(trained(spec)) is None
    assert obstacle(moon(parts(world(), {"lr": 0.1}, model())).train) is None
    found = obstacle(moon(parts(world(), {"lr": 0.1}, spec)).train)
    assert found is not None
    assert found.where == "model"


def test_clipping_and_momentum_are_tried_where_they_are_set(monkeypatch) -> None:
    monkeypatch.setattr(stacked_steps, "_clipped", lambda gradients, largest: gradients)
    assert obstacle(trained(model())) is None
    assert obstacle(trained(model(), clip_norm=0.01)) is not None
    monkeypatch.setattr(stacked_steps, "optimizer", lambda settings, lr, kept: lambda weights, found: None)
    assert obstacle(trained(model())) is None
    assert obstacle(trained(model(), momentum=0.5)) is not None


# ---- rules


def ruled(grad: Any, **more: Any) -> Obstacle | None:
    return obstacle(
        trained(model(), ClientRule(name="mine", grad=grad, traits=Traits(stackable=True), **more))
    )


def lengths(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
    """Mixes clients: the length is that of all their gradients."""
    length = torch.stack([g.norm() for g in gradients]).norm()
    return [g / length for g in gradients]


def pulled(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
    return [g + 0.3 * (p - a) for g, p, a in zip(gradients, parameters, context.anchor, strict=True)]


def test_a_rule_that_says_wrongly_that_it_may_be_stacked_is_found_out() -> None:
    assert ruled(pulled) is None
    found = ruled(lengths)
    assert found is not None
    assert found.where == "client"
    assert "'mine' computes other results for several clients" in found.what


def test_a_rule_that_needs_the_server_is_not_tried_without_it() -> None:
    assert ruled(lengths, server_rules={"mine": ServerRule()}) is None


def test_a_rule_that_fails_alone_too_fails_in_the_run() -> None:
    assert ruled(lambda gradients, parameters, context: context.payload["missing"]) is None


def test_what_rounding_alone_decides_is_held_against_no_rule() -> None:
    """The gradient of a bias before a normalization is 0 but for rounding, and so its sign is anything."""

    def normalized(input_shape: Sequence[int], classes: int) -> nn.Module:
        layers = nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), nn.GroupNorm(4, 4), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(16, classes))

    rule = ClientRule(
        name="signs", grad=lambda g, p, context: [x.sign() for x in g], traits=Traits(stackable=True)
    )
    assert obstacle(trained(model(factory=normalized), rule)) is None


def test_running_out_of_memory_is_no_obstacle(monkeypatch) -> None:
    def scarce(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(stackable_trial, "train_together", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        obstacle(trained(model()))


# ---- memory


def test_the_batch_that_is_counted_is_one_that_a_client_has() -> None:
    def bytes_of(largest: int | None, **local: Any) -> int:
        return trained(model(), **local).footprint(CPU, largest)

    sizes = [bytes_of(100, batch_size=size) for size in (1, 2, 8, 100)]
    each = sizes[1] - sizes[0]
    assert each > 0
    assert sizes[2:] == [sizes[0] + 7 * each, sizes[0] + 99 * each]
    assert bytes_of(8, batch_size=5000) == bytes_of(8, batch_size="all") == sizes[2]
    assert bytes_of(100, batch_size="all", examples=8) == sizes[2]
    assert bytes_of(100, batch_size=4, examples=8) == sizes[0] + 3 * each
    assert bytes_of(None, batch_size=8) == sizes[2]
    assert bytes_of(None, batch_size="all") == sizes[0] + 31 * each


def test_images_that_each_client_holds_while_it_trains_are_counted() -> None:
    examples = Examples(torch.zeros(9, 1, 2, 2, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64))
    plain = ClientDataset(examples, torch.arange(5), (0.5,), (0.2,))
    train = trained(model(), batch_size=2)
    none = train.footprint(CPU, 5)
    assert train.footprint(CPU, 5, plain) == none  # gathered, for all clients at once
    own = replace(plain, features={"brightness": torch.zeros(1)})
    assert train.footprint(CPU, 5, own) == none + 2 * 5 * 4 * 4
    assert train.footprint(CPU, 5, replace(own, augment=Chain(()))) == none
    assert train.footprint(CPU, 2**23, own) == none  # batch by batch
    assert train.footprint(CPU, 5, world().clients[0]) == none


class Squares(Classification):
    """A regression: each example has as many targets as outputs."""

    drawn: ClassVar[list[Tensor]] = []

    @property
    def losses(self):
        return lambda outputs, targets: ((outputs - targets) ** 2).mean(1)

    def loss(self, outputs: Tensor, targets: Tensor, weights: None = None, normalize: bool = True) -> Tensor:
        return self.losses(outputs, targets).mean()

    def random_targets(
        self, n: int, classes: int, input_shape: tuple[int, ...], generator: torch.Generator
    ) -> Tensor:
        self.drawn.append(torch.randn(n, classes, generator=generator))
        return self.drawn[-1]


def test_the_targets_of_the_trial_are_the_tasks() -> None:
    assert obstacle(replace(trained(model()), task=Squares())) is None
    assert Squares.drawn


class Own(Classification):
    """A task whose `losses` forget the class weights."""

    @property
    def losses(self) -> Any:
        return self._losses


def test_class_weights_are_refused_also_of_a_task_with_losses_of_single_examples() -> None:
    plain = trained(model())
    assert obstacle(replace(plain, task=Own())) is None
    found = obstacle(replace(plain, task=Own(class_weights="balanced")))
    assert found is not None
    assert found.where == "task.class_weights"
