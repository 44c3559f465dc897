"""The memory of training: what is followed on the meta device, and the number against a measured process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlens.local.settings import LocalSettings
from fedlens.settings.memory_check import TrainingMemory, training_memory
from fedlens.tasks.classification import Classification

SGD = LocalSettings(lr=0.1)
ROOT = Path(__file__).parents[3]


def measured(
    module: nn.Module, batch: int, shape: tuple[int, ...], local: LocalSettings = SGD
) -> TrainingMemory:
    found = training_memory(module, shape, batch, local, Classification(), 10)
    assert found is not None
    return found


def test_a_linear_layer_takes_what_is_counted_by_hand() -> None:
    found = measured(nn.Linear(1000, 500, bias=False), 8, (1000,))
    outputs, weights = 8 * 500 * 4, 1000 * 500 * 4
    assert (found.model, found.trained, found.images) == (weights, weights, 8 * 1000 * 4)
    # The outputs are freed before their sum is differentiated; the gradient of the sum has no memory of its own.
    assert weights <= found.step <= weights + 2 * outputs


def test_memory_grows_with_the_batch_as_activations_do() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(1))

    one, ten = measured(made(), 16, (3, 32, 32)).step, measured(made(), 160, (3, 32, 32)).step
    assert 9.5 < ten / one < 10.5
    assert one > 3 * 16 * 16 * 32 * 32 * 4, "convolution, normalization and ReLU each keep their output"


def test_what_backward_does_not_need_is_freed() -> None:
    chain = nn.Sequential(*(nn.Sigmoid() for _ in range(10)))
    kept = measured(nn.Sequential(nn.Linear(1000, 1000), chain), 1000, (1000,))
    freed = measured(nn.Sequential(nn.Linear(1000, 1000), *(nn.Identity() for _ in range(10))), 1000, (1000,))
    assert kept.step - freed.step > 9 * 1000 * 1000 * 4


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({}, 1),
        ({"momentum": 0.9}, 2),
        ({"optimizer": "adam"}, 3),
        ({"optimizer": "adamw"}, 3),
        ({"optimizer": "lars", "momentum": 0.9}, 2),
    ],
)
def test_the_optimizer_s_state_counts(settings: dict[str, object], copies: int) -> None:
    found = measured(nn.Linear(10, 10), 2, (10,), LocalSettings.model_validate({"lr": 0.1, **settings}))
    assert found.kept == copies


def test_frozen_weights_have_no_gradients() -> None:
    module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 2))
    whole = measured(module, 2, (1000,)).step
    module = nn.Sequential(nn.Linear(1000, 1000).requires_grad_(False), nn.Linear(1000, 2))
    frozen = measured(module, 2, (1000,))
    assert whole - frozen.step > 0.9 * 1000 * 1000 * 4
    assert frozen.trained == (1000 * 2 + 2) * 4


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(tokens).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).mean((1, 2))


def test_attention_does_not_make_its_matrix() -> None:
    found = measured(Attends(), 1, (4096, 16))
    assert found.step < 4096 * 4096 * 4 / 4


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(images) if images.sum().item() >= 0 else self.fc(-images)


def test_a_model_that_looks_at_values_is_not_measured() -> None:
    assert training_memory(Looks(), (4,), 2, SGD, Classification(), 2) is None


@pytest.mark.parametrize(
    ("model", "size", "batch", "optimizer"),
    [
        ("resnet20", 32, 64, {}),
        pytest.param("resnet20", 32, 256, {"momentum": 0.9}, marks=pytest.mark.nightly),
        pytest.param("mobilenet-v3-large", 224, 16, {}, marks=pytest.mark.nightly),
        pytest.param("resnet18", 224, 8, {"momentum": 0.9}, marks=pytest.mark.nightly),
        pytest.param("vit-tiny", 224, 16, {"optimizer": "adam"}, marks=pytest.mark.nightly),
    ],
)
def test_the_number_is_within_30_percent_of_a_measured_process(
    model: str, size: int, batch: int, optimizer: dict[str, object]
) -> None:
    command = [sys.executable, "-m", "tests.unit.settings.measured_training"]
    arguments = json.dumps({"model": model, "size": size, "batch": batch, "optimizer": optimizer})
    done = subprocess.run([*command, arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)
    assert 0.7 < found["needed"] / found["peak"] < 1.3, found
