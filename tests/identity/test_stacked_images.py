"""Clients that hold images of one set, which are gathered for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.core.protocol import ModelSpec
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples
from fedlens.engines.vectorized import vectorized
from tests.identity.identity_kit import (
    CLASSES,
    SIZES,
    World,
    course,
    parts,
)
from tests.identity.stacked_kit import LOCAL, STEPS


class Pictures(World):
    """Clients that hold uint8 images of one set; the first image is black, and nobody's."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        g = torch.Generator().manual_seed(3)
        n = sum(sizes) + 1
        images = torch.randint(1, 256, (n, 1, 2, 2), generator=g, dtype=torch.uint8)
        images[0] = 0
        examples = Examples(images, torch.randint(CLASSES, (n,), generator=g))
        places = (1 + torch.randperm(n - 1, generator=g)).split(list(sizes))
        super().__init__(tuple(ClientDataset(examples, at, (0.0,), (1.0,)) for at in places))  # type: ignore[arg-type]


def pictured(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Divides by the length of an image, which the black one does not have."""

    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.linalg.vector_norm(x, dim=1, keepdim=True)

    return nn.Sequential(nn.Flatten(), Unit(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes))


@pytest.mark.parametrize("name", ["plain", *LOCAL])
def test_gathered_images_are_each_clients_own(name: str) -> None:
    there, local = Pictures(), STEPS | LOCAL.get(name, {})
    spec = ModelSpec(pictured, "pictured", {}, (1, 2, 2), CLASSES, 0)
    given = parts(World(there.clients), local, spec, select=Uniform(4))
    made = ALGORITHMS.find("scaffold" if name in ("plain", "momentum", "decay") else "fedavg")(given)
    one, many = course(made, there), course(made, there, engine=vectorized())
    for a, b in zip(one.steps, many.steps, strict=True):
        assert (b.cohort, b.tally.replies, b.tally.failed) == (a.cohort, a.tally.replies, 0)
        torch.testing.assert_close(dict(b.after["model"]), dict(a.after["model"]), rtol=1e-4, atol=1e-5)


def dropping(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Dropout, and then division by a length that is 0 where everything was dropped."""

    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.linalg.vector_norm(x, dim=1, keepdim=True)

    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.1), Unit(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes)
    )


@pytest.mark.parametrize(("sizes", "batch"), [((5, 5, 5), 4), ((6, 9), 6), ((10, 4, 4), 6), ((7, 1), 3)])
@pytest.mark.parametrize("name", ["fedavg", "mime"])
def test_gathered_images_are_dropped_out_of_where_all_batches_are_short(
    name: str, sizes: tuple[int, ...], batch: int
) -> None:
    """The batches of a step are filled up to the run's largest; what fills them up takes part in no loss."""
    there, spec = Pictures(sizes), ModelSpec(dropping, "dropping", {}, (1, 2, 2), CLASSES, 0)
    local = {"lr": 0.2, "epochs": 2, "batch_size": batch}
    made = ALGORITHMS.find(name)(parts(World(there.clients), local, spec, select=Everyone()))
    one, many = course(made, there), course(made, there, engine=vectorized())
    for a, b in zip(one.steps, many.steps, strict=True):
        assert (b.tally.replies, b.tally.failed) == (a.tally.replies, 0)
        torch.testing.assert_close(dict(b.after["model"]), dict(a.after["model"]), rtol=1e-4, atol=1e-5)
