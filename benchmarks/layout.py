"""A training step in both memory layouts, in alternating pairs: what `engine.channels_last = "auto"` rests on.

    python -m benchmarks.layout [--pairs 15]

Bare PyTorch on one thread: forward, cross-entropy, backward and a plain SGD step on random images. A ratio is the
contiguous time over the channels-last time, the median of the pairs with their quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from fedlens.core.arithmetic import Arithmetic
from fedlens.models.simple import hsu_cnn, mcmahan_cnn, small_cnn

SECONDS = 0.2  # of one side of a pair
CASES: tuple[tuple[str, Callable[..., nn.Module], dict[str, Any], tuple[int, int, int], int], ...] = (
    ("small-cnn, width 32", small_cnn, {"width": 32}, (1, 28, 28), 32),
    ("small-cnn, batch norm", small_cnn, {"norm": "batch"}, (3, 32, 32), 32),
    ("small-cnn, group norm", small_cnn, {"norm": "group"}, (3, 32, 32), 32),
    ("mcmahan-cnn", mcmahan_cnn, {}, (1, 28, 28), 10),
    ("hsu-cnn", hsu_cnn, {}, (3, 32, 32), 20),
)


def stepper(make: Callable[..., nn.Module], settings: dict[str, Any], channels_last: bool) -> Any:
    """A function that takes one step on a batch of this shape, in one layout."""

    def prepared(shape: tuple[int, int, int], batch: int) -> Callable[[], None]:
        torch.manual_seed(0)
        module = make(shape, 10, **settings)
        module = Arithmetic(channels_last=channels_last).fit(module, torch.device("cpu"))
        images, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
        weights = list(module.parameters())

        def step() -> None:
            loss = nn.functional.cross_entropy(module(images), labels)
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                torch._foreach_add_(weights, gradients, alpha=-0.01)

        return step

    return prepared


def seconds(step: Callable[[], None], steps: int) -> float:
    """The time of so many steps."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    print(f"{torch.backends.cpu.get_cpu_capability()}, one thread, {pairs} pairs")
    for name, make, settings, shape, batch in CASES:
        plain, inner = (stepper(make, settings, last)(shape, batch) for last in (False, True))
        seconds(plain, 3), seconds(inner, 3)
        steps = max(1, int(SECONDS / (seconds(plain, 3) / 3)))
        ratios = []
        for pair in range(pairs):
            first, second = (plain, inner) if pair % 2 else (inner, plain)
            times = {first: seconds(first, steps)}
            times[second] = seconds(second, steps)
            ratios.append(times[plain] / times[inner])
        low, middle, high = quantiles(ratios, n=4)
        print(f"{name:<22} batch {batch:>3}   {middle:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
