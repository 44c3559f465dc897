"""Local training on a GPU, without one: fake tensors know their device and refuse to be mixed.

They have no values and no derivatives: gradients are zeros of the right kind, and a test ends where a number is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.core.protocol import Arithmetic, Call, Client, ModelSpec, RoundContext
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import mapped
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples
from fedlens.local import hook_checks, training
from fedlens.local.vectorized import model as stacked_model
from fedlens.local.vectorized import steps as stacked_steps
from tests.identity.identity_kit import CLASSES, parts, world

GPU = torch.device("cuda")
LOSSES: list[torch.Tensor] = []  # what gradients were asked for
RULES = ["fedavg", "fedprox", "feddyn", "scaffold", "fednova"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def zeros(loss: Any, parameters: Any, half: Any = None, stacked: bool = False) -> list[torch.Tensor]:
        LOSSES.append(loss)
        return [torch.zeros_like(p) for p in parameters]

    LOSSES.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.zeros(n, dtype=torch.int64))
        monkeypatch.setattr(Arithmetic, "fit", lambda self, module, device: module)
        monkeypatch.setattr(training, "gradients_of", zeros)
        monkeypatch.setattr(stacked_steps, "gradients_of", zeros)
        monkeypatch.setattr(stacked_steps, "differentiated", zeros)
        yield


def small(shape: Any, classes: int) -> nn.Module:
    """On the device from the start where tensors are fakes: a module of fakes cannot be moved."""
    with torch.device("cuda" if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) else "cpu"):
        layers = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(32, classes)
        return nn.Sequential(*layers)


def there(k: int) -> Client:
    images, labels = torch.zeros(20, 1, 4, 4, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64)
    examples = Examples(images, labels).on(GPU, 10_000)
    data = ClientDataset(examples, torch.arange(3, 13), (0.5,), (0.2,))
    return Client(k, data, {}, Secrets((k,)), {}, GPU)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_all_that_a_client_computes_is_on_its_device(
    name: str, together: bool, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unset_fake_temporarily():
        spec = ModelSpec(small, "small", {}, (1, 4, 4), CLASSES, 0)
        local = {"lr": 0.1, "epochs": 1, "batch_size": 4}
        made = ALGORITHMS.find(name)(parts(world(), local, spec))
        state = made.init(spec, world().info)
        ask = next(made.round(state, RoundContext(1, 2, world().info, Rng((0,)))))
    payload = mapped(ask.shared, lambda tensor: tensor.to(GPU))
    calls = [Call(payload, there(k), Rng((k,))) for k in (1, 2)]
    monkeypatch.setattr(hook_checks, "FIRST_VISITS", 0)  # fakes have no contents to compare
    monkeypatch.setattr(stacked_model, "known", lambda module: True)
    monkeypatch.setattr(stacked_model, "alike", lambda *given: True)
    train = made.ops["train"]
    # So far as the losses, which are numbers, and fakes have none.
    with pytest.raises((DataDependentOutputException, RuntimeError)) as raised:
        train.together(calls) if together else train(*calls[0])
    assert isinstance(raised.value.__cause__ or raised.value, DataDependentOutputException)
    assert {seen.device.type for seen in LOSSES} == {"cuda"}
    assert len(LOSSES) == 3
