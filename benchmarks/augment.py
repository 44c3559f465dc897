"""Times augmentation against a training step: batches of 32 and 64 images 3x32x32, `hsu-cnn`, one thread.

    python -m benchmarks.augment

Steps (forward, backward, SGD) and augmentations are timed in turn. Each figure is the median, and each share the ratio
of medians. `gather` is the time to make a batch without augmentation, and is not part of the shares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from fedlens.benchmark.limit import cifar_cnn
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain, Step
from fedlens.data.normalize import normalize

SHAPE = (3, 32, 32)
TURNS = 40
ALL = ("crop", "flip", "colour-jitter", "random-resized-crop")


def step_of(batch: int) -> Callable[[], None]:
    """One local SGD step on a batch."""
    model = cifar_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.rand(batch, *SHAPE), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def seconds(work: Callable[[], object]) -> float:
    """The seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    augments: dict[str, Step] = {name: AUGMENTS.find(name)(SHAPE) for name in AUGMENTS}
    augments["all four"] = Chain(tuple(augments[name] for name in ALL))
    data = torch.randint(0, 256, (500, *SHAPE), dtype=torch.uint8)
    for batch in (32, 64):
        images = data[:batch].clone()
        index, targets = torch.randperm(500)[:batch], torch.zeros(batch, dtype=torch.int64)
        works: dict[str, Callable[[], object]] = {
            "step": step_of(batch),
            "gather": lambda index=index: normalize(data[index], (0.5,) * 3, (0.25,) * 3),
            **{
                name: lambda change=change, images=images, targets=targets: change(images, targets, generator)
                for name, change in augments.items()
            },
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            work()
        for _ in range(TURNS):
            for name, work in works.items():
                times[name].append(seconds(work))
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(f"batch of {batch}")
        for name, value in medians.items():
            share = "" if name == "step" else f"{value / medians['step']:8.1%} of a step"
            print(f"  {name:22}{value * 1e3:8.2f} ms{share}")


if __name__ == "__main__":
    main()
