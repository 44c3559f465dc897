"""Where batches come from on a GPU, without one: fake tensors know their device and refuse to be mixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedlens.core.random import Rng
from fedlens.data.augment import make_pad_crop_flip
from fedlens.data.augmented import Chain
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples

GPU = torch.device("cuda")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Random numbers have no fakes: their orders are made of zeros."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.zeros(n, dtype=torch.int64))
        yield


def holding(resident: bool, **more: object) -> ClientDataset:
    images = torch.zeros(20, 1, 4, 4, dtype=torch.uint8)
    examples = Examples(images, torch.zeros(20, dtype=torch.int64)).on(GPU, 10_000 if resident else 0)
    assert examples.inputs.device.type == ("cuda" if resident else "cpu")
    return replace(ClientDataset(examples, torch.arange(3, 13), (0.5,), (0.2,)), **more)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_batches_are_on_the_device_wherever_the_images_lie(
    fake: None, monkeypatch: pytest.MonkeyPatch, resident: bool, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr("fedlens.data.client_datasets._WHOLE", 0)
    there = holding(resident)
    batches = there.batches(4, Rng((0,)))
    for size in (4, 4, 2, 4):
        images, labels = next(batches)
        assert (images.device.type, labels.device.type, len(labels)) == ("cuda", "cuda", size)
    together = there.group([])
    assert together is not None
    for images, labels in (there.stretch(2, 5), together.read(torch.arange(3))):
        assert (images.device.type, labels.device.type, images.shape) == ("cuda", "cuda", (3, 1, 4, 4))
    everything = replace(there, indices=None)
    assert everything.stretch(0, 5)[0].device.type == "cuda"
    assert there.read_targets().shape == (10,)
    assert there.take(torch.arange(2)).stretch(0, 2)[0].device.type == "cuda"


@pytest.mark.parametrize("resident", [True, False])
def test_augmentation_is_computed_there_too(fake: None, resident: bool) -> None:
    there = holding(resident, augment=Chain((make_pad_crop_flip((1, 4, 4)),)))
    images, labels = next(there.batches(4, Rng((0,))))
    assert (images.device.type, labels.device.type) == ("cuda", "cuda")


def test_nothing_moves_unless_it_is_asked_for() -> None:
    plain = Examples(torch.arange(12).view(4, 3), torch.arange(4))
    taken, _ = plain.batch(torch.tensor([2, 0]))
    assert taken.tolist() == [[6, 7, 8], [0, 1, 2]]
    there = plain.on(torch.device("cpu"), 1000)
    assert torch.equal(there.batch(torch.tensor([2, 0]))[0], taken)
