"""One round of FedAvg, and the same round in bare PyTorch: equal to the bit, in both memory layouts.

The loop below reads the published files, builds the CNN, trains with `torch.optim.SGD` and averages by hand. Of
fedlens it takes three documented facts: who holds which image (the partition that the run wrote down), which seed
belongs to which purpose, and that images are normalized as `x * 1/(255 std) - mean/std` in float32. On 6,000 images of
Fashion-MNIST, and on the digits where there are no real data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedlens.api import Experiment
from fedlens.core.random import Rng, derive
from fedlens.data.partition.partition import Partition

pytestmark = pytest.mark.usefixtures("quick_workers")

COHORT, BATCH, LR, MOMENTUM = 10, 50, 0.05, 0.9


Images = tuple[Tensor, Tensor]  # float32 [n, C, H, W], normalized, and int64 [n]


def normalized(images: np.ndarray, labels: np.ndarray, mean: float, std: float) -> Images:
    scaled = torch.from_numpy(images).float() * np.float32(1 / (255 * std)) + np.float32(-mean / std)
    return scaled, torch.from_numpy(labels).long()


def published(data: Path | None) -> Images:
    """The training images of Fashion-MNIST, from the IDX files; skips where there are none."""
    raw = data and data / "FashionMNIST" / "raw"
    if not raw or not raw.is_dir():
        pytest.skip("no FashionMNIST/raw below FEDLENS_DATA")
    images = np.fromfile(raw / "train-images-idx3-ubyte", np.uint8, offset=16).reshape(-1, 1, 28, 28)
    labels = np.fromfile(raw / "train-labels-idx1-ubyte", np.uint8, offset=8)
    return normalized(images, labels, 0.28604, 0.35302)  # of the training images, published in many tutorials


def digits(data: Path | None) -> Images:
    """scikit-learn's digits, less every fifth of each class, with ink from 0 to 16 made bytes."""
    ink, labels = load_digits(return_X_y=True)
    train = np.setdiff1d(np.arange(len(labels)), np.argsort(labels, kind="stable")[::5])
    images = ((ink[train].astype(np.int64) * 255 + 8) // 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    return normalized(images, labels[train], 0.30580244, 0.37605349)


def mcmahan() -> nn.Module:
    """The CNN of McMahan et al. 2017, 1,663,370 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def small() -> nn.Module:
    """The small CNN for images of 8x8, 16 channels wide."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@dataclass(frozen=True)
class Case:
    """A dataset and a model of fedlens, and how the bare loop comes by the same."""

    dataset: str
    model: str
    images: Callable[[Path | None], Images]
    build: Callable[[], nn.Module]
    clients: int


DIGITS = Case("digits", "small-cnn", digits, small, 20)
FASHION = Case("fashion-mnist", "mcmahan-cnn", published, mcmahan, 100)
RUNS = [  # the case, and channels last or not
    pytest.param(DIGITS, True, id="digits, channels last"),
    pytest.param(DIGITS, False, id="digits"),
    pytest.param(
        FASHION, True, id="fashion-mnist, channels last", marks=[pytest.mark.real, pytest.mark.nightly]
    ),
    pytest.param(FASHION, False, id="fashion-mnist", marks=[pytest.mark.real, pytest.mark.nightly]),
]


def bare_round(
    case: Case, data: Images, partition: Partition, seed: int, layout: torch.memory_format
) -> tuple[dict[str, Tensor], int]:
    """The first round of FedAvg: sample, one local epoch each, average by examples; the weights, and the examples."""
    images, labels = data
    draw = Rng((derive(seed, "seeds", "selection"), "round", 1)).numpy("select")
    cohort = draw.choice(len(partition), COHORT, replace=False)
    torch.manual_seed(derive(seed, "seeds", "initialization"))
    module = case.build().to(memory_format=layout)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    total, seen = {name: torch.zeros_like(p) for name, p in start.items()}, 0
    for slot, client in enumerate(cohort):
        module.load_state_dict(start)
        step = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        place = Rng((derive(seed, "seeds", "training"), "op", 1, 0, slot, int(client)))
        held = torch.from_numpy(partition[client].copy())
        order = held[torch.randperm(len(held), generator=place.torch("batches"))]
        for batch in order.split(BATCH):
            step.zero_grad()
            nn.functional.cross_entropy(
                module(images[batch].contiguous(memory_format=layout)), labels[batch]
            ).backward()
            step.step()
        for name, p in module.named_parameters():
            total[name].add_(start[name] - p.detach(), alpha=len(held))
        seen += len(held)
    return {name: start[name] - total[name] / seen for name in start}, seen


@pytest.mark.parametrize(("case", "channels_last"), RUNS)
def test_a_round_of_fedavg_is_bit_equal_to_a_bare_loop(
    case: Case, channels_last: bool, real_folder: Path | None, tmp_path: Path
) -> None:
    data = case.images(real_folder)
    settings: dict[str, Any] = {
        "seed": 3,
        "rounds": 1,
        "data": {"dataset": case.dataset, "partition": {"name": "iid", "clients": case.clients}},
        "model": case.model,
        "select": {"clients_per_round": COHORT},
        "local": {"lr": LR, "momentum": MOMENTUM, "epochs": 1, "batch_size": BATCH},
    }
    engines: dict[str, dict[str, Any]] = {
        "inline": {"name": "inline"},
        "processes": {"name": "processes", "workers": 2},
    }
    results = {
        name: Experiment(**settings, engine=engine | {"channels_last": channels_last}).run(
            tmp_path / name, data_dir=real_folder
        )
        for name, engine in engines.items()
    }
    partition = Partition.load(results["inline"].directory / "partition.npz")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    bare, examples = bare_round(case, data, partition, 3, layout)
    for result in results.values():
        weights = load_file(result.directory / "model.safetensors")
        assert weights.keys() == bare.keys()
        different = [name for name in bare if not torch.equal(weights[name], bare[name])]
        assert different == []
        assert result.metrics[1]["examples"] == examples
    if case.dataset == "fashion-mnist":
        assert examples == 6000
        assert results["inline"].metrics[1]["test_accuracy"] > 0.5
