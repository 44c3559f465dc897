"""Training on masks: a bare loop, FedIR pixel by pixel against a weighted loss by hand, and masks without a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedir import fedir, risk
from fedlens.core.protocol import FederationInfo, ModelSpec
from fedlens.local.rules import LocalContext
from fedlens.tasks.segmentation import Segmentation
from tests.identity.identity_kit import (
    CLASSES,
    Course,
    Points,
    Step,
    World,
    close,
    course,
    epoch,
    mean,
    parts,
    rng_of,
    same,
)

SHAPE, VOID = (2, 3, 4), 255
SGD = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 3}
SKEWED = [0.5, 0.3, 0.2]


@dataclass(frozen=True)
class Masks(World):
    """Clients with images and masks."""

    @property
    def info(self) -> FederationInfo:
        sizes = np.array([len(points) for points in self.clients])
        pixels = SHAPE[1] * SHAPE[2]
        return FederationInfo(
            sizes, CLASSES, SHAPE, {"@test": int(sizes.sum())}, None, "segmentation", pixels
        )


def images(seed: int, n: int, classes: Sequence[int] = range(CLASSES), void: float = 0.25) -> Points:
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, *SHAPE, generator=g, dtype=torch.float64)
    labels = torch.tensor(classes)[torch.randint(len(classes), (n, *SHAPE[1:]), generator=g)]
    masks = labels.to(torch.uint8).masked_fill(torch.rand(n, *SHAPE[1:], generator=g) < void, VOID)
    return Points(inputs, masks)


def there() -> Masks:
    """Clients of other sizes and classes; the third lacks a class."""
    return Masks((images(0, 4), images(1, 7, (0, 0, 1, 2)), images(2, 1, (0, 1)), images(3, 5)))


def net(input_shape: Sequence[int], classes: int) -> nn.Module:
    channels = input_shape[0]
    return nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, classes, 1)).double()


MODEL = ModelSpec(net, "net", {}, SHAPE, CLASSES, 0)


def counted(points: Points) -> list[int]:
    """The pixels of each class, by hand."""
    found = points.targets.flatten().tolist()
    return [found.count(label) for label in range(CLASSES)]


def ratios(points: Points, target: Sequence[float]) -> Tensor:
    counts = counted(points)
    pairs = zip(target, counts, strict=True)
    return torch.tensor([p * sum(counts) / m if m else 0.0 for p, m in pairs], dtype=torch.float64)


def by_pixel(logits: Tensor, masks: Tensor, weights: Tensor, normalize: bool) -> Tensor:
    """sum_i w_i l_i over the sum of w_i, or over the number of labelled pixels, one pixel after the other."""
    total, mass, pixels = logits.sum() * 0, 0.0, 0
    for k, row, column in np.ndindex(*masks.shape):
        label = int(masks[k, row, column])
        if label != VOID:
            z = logits[k, :, row, column]
            total = total + weights[label] * (z.logsumexp(0) - z[label])
            mass, pixels = mass + float(weights[label]), pixels + 1
    return total / ((mass if normalize else pixels) or 1.0)


def bare(tree, points: Points, weights: Tensor | None, rng, normalize: bool = True) -> dict[str, Tensor]:
    """One client in bare PyTorch; without weights with torch's own mean."""
    module = net(SHAPE, CLASSES)
    module.load_state_dict(dict(tree))
    step = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    order = rng.torch("batches")
    for _ in range(2):
        for at in epoch(len(points), 3, order):
            step.zero_grad()
            logits, masks = module(points.inputs[at]), points.targets[at]
            if weights is None:
                loss = F.cross_entropy(logits, masks.long(), ignore_index=VOID)
            else:
                loss = by_pixel(logits, masks, weights, normalize)
            loss.backward()
            step.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def expected(run: Course, step: Step, weights, normalize: bool = True) -> dict[str, Tensor]:
    """The round in bare PyTorch; `weights` gives those of a client."""
    clients = [
        bare(
            step.before["model"],
            run.there.clients[k],
            weights(run.there.clients[k]),
            rng_of(step, slot),
            normalize,
        )
        for slot, k in enumerate(step.cohort)
    ]
    return mean(clients, [len(run.there.clients[k]) for k in step.cohort])


def made(world: Masks, select=None, task: Segmentation | None = None, **local):
    return parts(world, {**SGD, **local}, MODEL, task=task or Segmentation(), select=select or Everyone())


def test_clients_descend_the_mean_over_labelled_pixels() -> None:
    world = there()
    run = course(fedavg(made(world, Uniform(3))), world)
    for step in run.steps:
        close(step.after["model"], expected(run, step, lambda points: None))


@pytest.mark.parametrize("normalize", [True, False], ids=["eq. 4", "eq. 1"])
def test_fedir_weighs_pixel_by_pixel_with_q_of_the_clients_pixels(normalize: bool) -> None:
    world = there()
    run = course(fedir(made(world, Uniform(3)), target=SKEWED, normalize=normalize), world)
    for step in run.steps:
        close(step.after["model"], expected(run, step, lambda points: ratios(points, SKEWED), normalize))
    assert not same(run.final, course(fedavg(made(world, Uniform(3))), world).final)


def test_the_target_of_the_population_is_its_share_of_pixels() -> None:
    world = there()
    whole = made(world, batch_size="all")  # counting is another ask, after which batches are in another order
    run = course(fedir(whole, target="population"), world, rounds=2)
    pooled = torch.tensor([counted(points) for points in world.clients]).sum(0).double()
    given = course(fedir(whole, target=(pooled / pooled.sum()).tolist()), world, rounds=2)
    close(run.final, given.final)


def test_the_clients_own_pixels_as_the_target_are_fedavg() -> None:
    world = there()
    counts = counted(world.clients[1])
    own = [count / sum(counts) for count in counts]
    for normalize in (True, False):
        given = made(world, Fixed((1,)))
        close(
            course(fedir(given, target=own, normalize=normalize), world).final,
            course(fedavg(given), world).final,
        )


def test_balanced_class_weights_are_those_of_the_clients_pixels() -> None:
    world = there()
    run = course(fedavg(made(world, task=Segmentation(class_weights="balanced"))), world)
    for step in run.steps:
        close(step.after["model"], expected(run, step, lambda points: ratios(points, [1 / 3] * 3)))


def test_eq_1_is_an_unbiased_estimate_of_the_targets_loss_over_pixels() -> None:
    points = images(7, 4, (0, 0, 1, 2), void=0.0)
    module = net(SHAPE, CLASSES)
    context = LocalContext(["w"], [torch.zeros(1, dtype=torch.float64)], {}, {}, 0.1, 1)
    client = SimpleNamespace(id=0, data=points, scratch={})
    context.problem = SimpleNamespace(  # type: ignore[assignment]
        task=Segmentation(), client=client, model=SimpleNamespace(classes=CLASSES)
    )
    with torch.no_grad():
        logits = module(points.inputs)
        each = F.cross_entropy(logits, points.targets.long(), reduction="none")
        wanted = sum(p * each[points.targets == y].mean() for y, p in enumerate(SKEWED))
        for size in (1, 2, 3, 4):
            batches = [torch.tensor(at) for at in combinations(range(4), size)]
            values = [
                risk(logits[at], points.targets[at], context, target=SKEWED, normalize=False)
                for at in batches
            ]
            torch.testing.assert_close(torch.stack(values).mean(), wanted)


@pytest.mark.parametrize("algorithm", [fedavg, fedir])
@pytest.mark.parametrize("dice", [0.0, 1.0])
def test_a_client_whose_masks_have_no_class_sends_a_zero_update_and_does_not_fail(algorithm, dice) -> None:
    world = Masks((images(0, 5, void=1.0), images(1, 4)))
    run = course(algorithm(made(world, Fixed((0,)), Segmentation(dice=dice))), world, rounds=2)
    assert same(run.final, run.steps[0].before["model"])
    assert [step.tally.failed for step in run.steps] == [0, 0]
    both = course(algorithm(made(world, task=Segmentation(dice=dice))), world, rounds=2)
    assert all(value.isfinite().all() for value in both.final.values())
    assert not same(both.final, both.steps[0].before["model"])
