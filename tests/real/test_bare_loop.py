"""One round on 6,000 Fashion-MNIST images, and the same round in bare PyTorch: equal to the bit.

The loop below reads the published files, builds the CNN, trains with `torch.optim.SGD` and averages by hand. Of
fedlens it takes three documented facts: who holds which image (the partition that the run wrote down), which seed
belongs to which purpose, and that images are normalized as `x * 1/(255 std) - mean/std` in float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedlens.api import Experiment
from fedlens.core.random import Rng, derive
from fedlens.data.partition.partition import Partition

pytestmark = pytest.mark.real

COHORT, BATCH, LR, MOMENTUM = 10, 50, 0.05, 0.9


def published(raw: Path, split: str) -> tuple[Tensor, Tensor]:
    """float32 [n, 1, 28, 28] and int64 [n], from the IDX files, normalized."""
    images = np.fromfile(raw / f"{split}-images-idx3-ubyte", np.uint8, offset=16).reshape(-1, 1, 28, 28)
    labels = np.fromfile(raw / f"{split}-labels-idx1-ubyte", np.uint8, offset=8)
    mean, std = 0.28604, 0.35302  # of the training images, published in many tutorials
    scaled = torch.from_numpy(images).float() * np.float32(1 / (255 * std)) + np.float32(-mean / std)
    return scaled, torch.from_numpy(labels).long()


def mcmahan(seed: int) -> nn.Module:
    """The CNN of McMahan et al. 2017, 1,663,370 parameters."""
    torch.manual_seed(seed)
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


def bare_round(
    images: Tensor, labels: Tensor, partition: Partition, seed: int, layout: torch.memory_format
) -> dict[str, Tensor]:
    """The first round of FedAvg: sample, one local epoch each, average by the number of examples."""
    draw = Rng((derive(seed, "seeds", "selection"), "round", 1)).numpy("select")
    cohort = draw.choice(len(partition), COHORT, replace=False)
    module = mcmahan(derive(seed, "seeds", "initialization")).to(memory_format=layout)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    total, seen = {name: torch.zeros_like(p) for name, p in start.items()}, 0.0
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
    assert seen == 6000
    return {name: start[name] - total[name] / seen for name in start}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_round_of_fedavg_is_bit_equal_to_a_bare_loop(
    channels_last: bool, real_data: Path, tmp_path: Path
) -> None:
    raw = real_data / "FashionMNIST" / "raw"
    if not raw.is_dir():
        pytest.skip("no FashionMNIST/raw below FEDLENS_DATA")
    settings: dict[str, Any] = {
        "seed": 3,
        "rounds": 1,
        "data": {"dataset": "fashion-mnist", "partition": {"name": "iid", "clients": 100}},
        "model": "mcmahan-cnn",
        "select": {"clients_per_round": COHORT},
        "local": {"lr": LR, "momentum": MOMENTUM, "epochs": 1, "batch_size": BATCH},
    }
    engines: dict[str, dict[str, Any]] = {
        "inline": {"name": "inline"},
        "processes": {"name": "processes", "workers": 2},
    }
    results = {
        name: Experiment(**settings, engine=engine | {"channels_last": channels_last}).run(
            tmp_path / name, data_dir=real_data
        )
        for name, engine in engines.items()
    }
    partition = Partition.load(results["inline"].directory / "partition.npz")
    images, labels = published(raw, "train")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    bare = bare_round(images, labels, partition, 3, layout)
    for result in results.values():
        ours = load_file(result.directory / "model.safetensors")
        assert ours.keys() == bare.keys()
        different = [name for name in bare if not torch.equal(ours[name], bare[name])]
        assert different == []
        assert result.metrics[1]["examples"] == 6000
    assert results["inline"].metrics[1]["test_accuracy"] > 0.5
