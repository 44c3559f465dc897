"""Runs the settings of published speed benchmarks with fedlens, and prints the clients that it trains a second.

    python -m benchmarks.published flute --data-dir DIR
    python -m benchmarks.published pfl --engine vectorized

- `flute`: the CPU benchmark of FLUTE's README (github.com/microsoft/msrflute): logistic regression on MNIST, 1,000
  clients, 10 a round, batches of 10, learning rate 0.03, one epoch, 100 rounds, evaluated every 20. Here each
  client has 60 images, with labels of a Dirichlet distribution with alpha 0.5. Fashion-MNIST, the default, has images
  of the same number and shape as MNIST.
- `pfl`: a tenth of the CIFAR-10 benchmark of pfl-research (benchmarks/image_classification/configs/baseline.yaml in
  github.com/apple/pfl-research): 1,000 clients of 50 images, 50 a round, batches of 10, learning rate 0.1, one epoch,
  150 rounds in place of 1,500, evaluated every 10; its CNN has two convolutions and two dense layers, with dropout.

A run is a process of its own, as a user starts it. Its wall time includes the start of Python, reading the data and all
evaluations; the training time is that of the rounds alone. Published times are of other machines: compare orders of
magnitude.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import nn

COMMON = ["algorithm.name='fedavg'", "local.batch_size=10", "local.epochs=1"]
SETTINGS = {
    "flute": [
        "data.partition={name='dirichlet', clients=1000, alpha=0.5}", "model.name='linear'", "rounds=100",
        "select.clients_per_round=10", "local.lr=0.03", "evaluation.every=20",
    ],
    "pfl": [
        "data.dataset='cifar10'", "data.partition={name='iid', clients=1000}", "rounds=150",
        "model.name='benchmarks.published:simple_cnn'", "select.clients_per_round=50", "local.lr=0.1",
        "evaluation.every=10",
    ],
}  # fmt: skip


def simple_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A CNN of two 3 x 3 convolutions and a hidden layer of 128 units, with dropout and Glorot's initialization.

    >>> sum(p.numel() for p in simple_cnn((3, 32, 32), 10).parameters())
    1626442
    """
    channels, side, _ = input_shape
    model = nn.Sequential(
        nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * ((side - 4) // 2) ** 2, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model


def overrides_of(setting: str, dataset: str) -> list[str]:
    """The changes that make a setting of an empty file; `dataset` is that of `flute`."""
    changes = [*COMMON, *SETTINGS[setting]]
    return [*changes, f"data.dataset='{dataset}'"] if setting == "flute" else changes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The settings of published speed benchmarks.")
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--dataset", default="fashion-mnist", help="of flute: mnist or fashion-mnist")
    parser.add_argument("--engine", default="default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in fedlens run")
    parser.add_argument("--data-dir", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedlens-published-") as folder:
        base, out = Path(folder) / "published.toml", Path(folder) / "run"
        base.write_text("", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "fedlens",
            "run",
            str(base),
            "--engine",
            asked.engine,
            "--out",
            str(out),
        ]
        command += ["--quiet", "--no-report"]
        command += [] if asked.data_dir is None else ["--data-dir", str(asked.data_dir)]
        for change in [*overrides_of(asked.setting, asked.dataset), *asked.set]:
            command += ["--set", change]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = sum(line.get("clients", 0) for line in lines)
    training = sum(line.get("seconds", 0.0) for line in lines)
    accuracy = next(line["test_accuracy"] for line in reversed(lines) if "test_accuracy" in line)
    name = f"{asked.setting}, engine {asked.engine}"
    print(f"{name}: {trained:,} clients in {seconds:.1f} s, {trained / seconds:,.1f} a second")
    print(f"of that {training:.1f} s of training: {trained / training:,.1f} clients a second")
    print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
