"""Measures the local steps of DP-SGD against a bare loop of opacus: processor seconds a step, and memory.

    python -m benchmarks.dp_sgd          # the network and the batch of fashion-mnist/dp-sgd, on random images
    python -m benchmarks.dp_sgd --steps 80

Both sides take the same number of steps with one thread, once to warm up. The goal is 1.1 times the seconds of opacus.
Memory is the largest that a process of its own has, less what it has before the steps, with both libraries imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlens.core.protocol import Client
from fedlens.core.random import Rng, Secrets
from fedlens.run.build import Built, build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan

IMAGES, BATCH = 6000, 250
PRIVACY = {"unit": "example", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}


def experiment(steps: int) -> Built:
    """One client with random images, whose round has so many steps."""
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {
            "dataset": {"name": "synthetic", "shape": [1, 28, 28], "train": IMAGES, "test": 10},
            "partition": {"name": "iid", "clients": 1},
            "normalize": "unit",
        },
        "model": {"name": "small-cnn", "width": 8, "norm": "none"},
        "local": {"lr": 0.1, "steps": steps, "batch_size": BATCH},
        "privacy": PRIVACY,
        "engine": "inline",
    }
    return build(plan(read_config(settings), Source(settings)), Path(), download=False)


def of_fedlens(built: Built) -> None:
    """The steps of fedlens."""
    train: Any = built.algorithm.ops["train"]
    data = built.client_data.data_of(0)
    client = Client(0, data, {}, Secrets((0, 0)), {}, torch.device("cpu"))
    model = built.algorithm.init(built.model, built.federation)["model"]
    with ExitStack() as closing:
        context = train.context({"model": model, "lr": 0.1}, client, Rng((0, "op", 1, 0, 0, 0)), closing)
        train.rule.solve(context)


def of_opacus(built: Built) -> None:
    """The same steps by opacus, on images in memory."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    images, labels = built.client_data.data_of(0).stretch(0, IMAGES)
    module = GradSampleModule(built.model.build(), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=BATCH,
    )
    for _ in range(built.config.local.steps or 0):
        drawn = torch.rand(IMAGES) < BATCH / IMAGES
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images[drawn]), labels[drawn], reduction="sum").backward()
        optimizer.step()


SIDES = {"fedlens": of_fedlens, "opacus": of_opacus}


def growth(name: str, steps: int) -> int:
    """The bytes that the steps of a side need at most, in this process, which has taken none."""
    import opacus  # noqa: F401 - its own memory is not that of the steps

    built, before = experiment(steps), _resident("VmRSS")
    SIDES[name](built)
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


def main() -> None:
    """Prints both sides and their ratios."""
    parser = argparse.ArgumentParser(description="DP-SGD against a bare loop of opacus.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory-of", choices=SIDES, help="print the bytes of one side alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.memory_of:
        print(growth(asked.memory_of, asked.steps))
        return
    built, seconds, memory = experiment(asked.steps), {}, {}
    for name, side in SIDES.items():
        side(built)
        start = time.process_time()
        side(built)
        seconds[name] = (time.process_time() - start) / asked.steps
        command = [
            sys.executable,
            "-m",
            "benchmarks.dp_sgd",
            "--steps",
            str(asked.steps),
            "--memory-of",
            name,
        ]
        memory[name] = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        print(f"{name}: {seconds[name] * 1e3:.0f} ms a step, {memory[name] / 2**20:.0f} MiB")
    ratio, more = (of["fedlens"] / of["opacus"] for of in (seconds, memory))
    print(f"fedlens / opacus: {ratio:.2f} of its seconds (goal: 1.1), {more:.2f} of its memory")


if __name__ == "__main__":
    main()
