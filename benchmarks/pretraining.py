"""Measures pre-training on fractals: drawing, augmenting, and SimSiam against a bare PyTorch step.

    python -m benchmarks.pretraining              # all three, one thread each
    python -m benchmarks.pretraining --turns 10

Drawing: images a second of one thread, one fractal each; the goals are 20,000 of 32x32 pixels with 1,000 points, and
300 of 224x224 with 100,000. Pairs: pairs of views a second, composed of 2 to 5 fractals each and augmented as in the
recipe `chen2022/fps-simsiam`, against those that one training process of `resnet20` takes; the goal is three times.
Step: local training with SimSiam against a loop of PyTorch over the same views, which are ready in memory on both
sides, in turn; the goal is a ratio of 1.10. Each figure is a median over turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core.arithmetic import Arithmetic
from fedlens.core.protocol import Client, ClientExamples, ModelSpec
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.datasets.fractals import fractals
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.models.prepare import Preparation
from fedlens.models.resnet import resnet20
from fedlens.settings.config_source import read_source
from fedlens.settings.plan import plan_of
from fedlens.tasks.simsiam import SimSiam

BATCH, STEPS = 128, 4
SHAPE = (3, 32, 32)
RECIPE = "chen2022/fps-simsiam"


@dataclass(frozen=True)
class Ready(ClientExamples):
    """Views in memory, the same ones in every batch."""

    views: Tensor

    def __len__(self) -> int:
        return len(self.views)

    def read_targets(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Targets without content."""
        return torch.zeros(len(self), 0, dtype=torch.uint8)[start:stop]

    def stretch(self, start: int, stop: int, /) -> tuple[Tensor, Tensor]:
        """The views at these positions."""
        return self.views[start:stop], self.read_targets(start, stop)

    def batches(self, size: int, rng: Rng, whole: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """All views, without end."""
        while True:
            yield self.stretch(0, size)


def main() -> None:
    """Prints the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    for size, goal, count in ((32, 20_000, 4000), (224, 300, 100)):
        rate = count / timed(turns, drawing(size, count))[0]
        said(f"fractals of {size}x{size} pixels", f"{rate:,.0f} a second", rate >= goal, f"{goal:,}")
    train, bare = steps("bf16")
    pairs = BATCH / timed(turns, composed())[0]
    trained = STEPS * BATCH / timed(turns, train)[0]
    said(
        "pairs composed and augmented",
        f"{pairs:,.0f} a second, {pairs / trained:.1f} times the {trained:,.0f} that training takes in bf16",
        pairs >= 3 * trained,
        "3 times",
    )
    for precision in ("fp32", "bf16"):
        train, bare = steps(precision)
        ours, theirs = timed(turns, train, bare)
        ratio = ours / theirs
        said(f"SimSiam in {precision}", f"{ratio:.3f} of a bare PyTorch step", ratio <= 1.10, "1.10")


def said(what: str, value: str, met: bool, goal: str) -> None:
    """Prints a line with the verdict."""
    print(f"{what}: {value}; goal {goal} {'met' if met else 'missed'}")


def timed(turns: int, *works: Callable[[], object]) -> list[float]:
    """The median seconds of each, in turn, after one call that warms up."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(turns + 1):
        for place, work in enumerate(works):
            start = time.perf_counter()
            work()
            if turn:
                seconds[place].append(time.perf_counter() - start)
    return [statistics.median(each) for each in seconds]


def drawing(size: int, count: int) -> Callable[[], object]:
    """Draws so many images of one fractal that fills the image."""
    data = fractals(
        Path(),
        False,
        0,
        size=size,
        train=count,
        test=1,
        codes=500,
        fractals=(1, 1),
        scale=(1.0, 1.0),
        pairs=False,
    )
    return lambda: data.train.inputs.take(np.arange(count))


def composed() -> Callable[[], object]:
    """Composes and augments one batch of pairs, as the recipe does."""
    source = read_source(RECIPE, ("data.dataset.codes=2000", "data.dataset.fractals=[2, 5]"))
    planned = plan_of(source)
    data = fractals(Path(), False, 0, train=50_000, test=1, codes=2000)
    chain = Chain(tuple(choice(SHAPE) for choice in planned.augments))
    one = ClientDataset(data.train.tensors(), None, data.mean, data.std, chain, prefetch=0, views=2)
    batches = one.batches(BATCH, Rng((0,)))
    return lambda: next(batches)


def steps(precision: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """(local training with SimSiam, the same steps in bare PyTorch) on `resnet20`."""
    task, arithmetic = SimSiam(), Arithmetic(precision, channels_last=True)
    model = task.wrap(ModelSpec(resnet20, "resnet20", {}, SHAPE, 1, 0, Preparation(classifier=False)))
    views = torch.randn(BATCH, 2, *SHAPE, generator=torch.Generator().manual_seed(0))
    local = LocalSettings(lr=0.03, momentum=0.9, weight_decay=5e-4, steps=STEPS, batch_size=BATCH)
    client = Client(0, Ready(views), {}, Secrets((0,)), {}, torch.device("cpu"), arithmetic)
    train = Train(model, task, local, ClientRule(), keep_optimizer=True)
    payload = {"model": tree_of(model.build()), **local.shared_rate(1, 1)}

    net = model.build().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    parts = [view.contiguous(memory_format=torch.channels_last) for view in views.unbind(1)]

    def bare() -> None:
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                z = [net.projector(net.encoder(part)) for part in parts]
                p = [net.predictor(each) for each in z]
            similar = F.cosine_similarity(p[0].float(), z[1].detach().float())
            similar = similar + F.cosine_similarity(p[1].float(), z[0].detach().float())
            optimizer.zero_grad()
            (-similar.mean() / 2).backward()
            optimizer.step()

    return lambda: train(payload, client, Rng((0, "op"))), bare


if __name__ == "__main__":
    main()
