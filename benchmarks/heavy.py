"""Measures the memory of a heavy model: copies of its weights at the peak of a run, over all its processes.

    python -m benchmarks.heavy                      # 86 million weights, as in ViT-B/16; 20 clients a round
    python -m benchmarks.heavy --width 256 --engines inline

Memory is the operating system's: the proportional set size (each page shared by n processes counts 1/n for each) of
the process that drives the run and of all its workers, read every 20 ms. The memory of the same run with a model of
a few thousand weights is subtracted. The model has the linear layers of a transformer and no attention, so its
activations are small.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import psutil
from torch import nn

FEDLENS = [sys.executable, "-m", "fedlens"]
SETTINGS = """
name = "heavy"
rounds = {rounds}
data = {{ dataset = "digits", partition = {{ name = "iid", clients = 40 }} }}
model = {{ name = "benchmarks.heavy:transformer_sized", width = {width} }}
select = {{ clients_per_round = {cohort} }}
local = {{ lr = 0.01, steps = 2, batch_size = 8 }}
algorithm = "{algorithm}"
engine = {{ {engine} }}
evaluation = {{ every = {rounds} }}
checkpoint = {{ seconds = {checkpoint} }}
"""
ENGINES = {
    "inline": 'name = "inline"',
    "processes": 'name = "processes", workers = 2',
    "processes, window 1": 'name = "processes", workers = 2, window = 1',
}


def transformer_sized(input_shape: Sequence[int], classes: int, *, width: int = 716) -> nn.Module:
    """Twelve blocks of linear layers, 86 million weights in all, as many as ViT-B/16 has."""

    def block() -> list[nn.Module]:
        return [
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width),
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
        ]  # fmt: skip

    layers = [layer for _ in range(12) for layer in block()]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(input_shape), width), *layers, nn.Linear(width, classes)
    )


def proportional(process: psutil.Process) -> int:
    """Bytes of this process and all that it started, shared pages shared out."""
    total = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            total += each.memory_full_info().pss
        except AttributeError:
            raise SystemExit(
                "memory is measured on Linux alone, where the system tells shared pages"
            ) from None
        except (psutil.Error, OSError):
            continue  # it is gone
    return total


class Peak(NamedTuple):
    """A run: its peak in bytes, its seconds from the command to the end, and where it is."""

    most: int
    seconds: float
    out: Path


def peak(settings: str, scratch: Path) -> Peak:
    """Runs these settings below `scratch` and watches their memory."""
    file = scratch / "run.toml"
    file.write_text(settings)
    began = time.perf_counter()
    out = scratch / f"run-{time.monotonic_ns()}"
    command = [*FEDLENS, "run", str(file), "--out", str(out), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    watched, most = psutil.Process(process.pid), 0
    while process.poll() is None:
        try:
            most = max(most, proportional(watched))
        except psutil.Error:
            break
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"the run ended with {process.returncode}")
    return Peak(most, time.perf_counter() - began, out)


def main() -> None:
    """Prints a row for each engine."""
    parser = argparse.ArgumentParser(description="Copies of a heavy model in memory.")
    parser.add_argument("--width", type=int, default=716, help="716 makes 86 million weights")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--checkpoint", type=float, default=1000.0, help="seconds between checkpoints")
    parser.add_argument("--engines", nargs="*", default=["inline", "processes"], choices=ENGINES)
    asked = parser.parse_args()
    model = transformer_sized((1, 8, 8), 10, width=asked.width)
    weights = sum(parameter.numel() for parameter in model.parameters())
    del model
    size = 4 * weights
    print(f"{weights:,} weights, {size / 1e6:,.0f} MB a copy; {asked.cohort} clients a round")
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.engines:
            common = {"engine": ENGINES[name], "rounds": asked.rounds, "cohort": asked.cohort}
            common |= {"algorithm": asked.algorithm, "checkpoint": asked.checkpoint}
            least = peak(SETTINGS.format(width=8, **common), Path(folder)).most
            most, seconds, _ = peak(SETTINGS.format(width=asked.width, **common), Path(folder))
            copies = (most - least) / size
            print(
                f"{name:22} peak {most / 1e6:,.0f} MB, {least / 1e6:,.0f} without the model: "
                f"{copies:.1f} copies; {seconds:.0f} s"
            )


if __name__ == "__main__":
    main()
