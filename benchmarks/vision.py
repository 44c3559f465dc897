"""Times a training visit and an evaluation of the vision models against a bare PyTorch loop, in process time.

    python -m benchmarks.vision                          # both models, training and evaluation
    python -m benchmarks.vision resnet20 --pairs 9 --threads 2

Both sides use the same module, images in memory, batches, threads and memory layout (the one that fedlens chooses).
They are timed in turn, and each figure is the median of the ratios of a turn, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedlens.core.arithmetic import Arithmetic
from fedlens.core.modules import loadable
from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import Examples
from fedlens.data.normalize import normalize
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.models.registry import MODELS
from fedlens.tasks.central_evaluation import measured
from fedlens.tasks.classification import Classification

MEAN, STD = (0.5,) * 3, (0.5,) * 3


@dataclass(frozen=True)
class Case:
    """A model, its images, and the sizes of batches."""

    model: str
    shape: tuple[int, int, int]
    classes: int
    steps: int
    batch: int
    tested: int


CASES = [
    Case("resnet20", (3, 32, 32), 10, 16, 32, 500),
    Case("mobilenet-v3-large", (3, 224, 224), 1000, 4, 16, 32),
]


def sides(case: Case) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """(fedlens, bare) for training and for evaluation."""
    spec = ModelSpec(MODELS.find(case.model), case.model, {}, case.shape, case.classes, 0)
    n = max(case.steps * case.batch, case.tested)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *case.shape), dtype=torch.uint8, generator=g)
    labels = torch.randint(0, case.classes, (n,), generator=g)
    rows = torch.arange(case.steps * case.batch)
    data = ClientDataset(Examples(images, labels), rows, MEAN, STD)
    tested = ClientDataset(Examples(images, labels), None, MEAN, STD)
    client = Client(0, data, {}, Secrets((0,)), {}, torch.device("cpu"), Arithmetic(channels_last="auto"))
    task, tree = Classification(), tree_of(spec.build())
    train = Train(spec, task, LocalSettings(lr=1e-4, batch_size=case.batch), ClientRule())
    learner = loadable(spec, client)
    last = client.arithmetic.lays_out(spec.build(), client.device)
    layout = torch.channels_last if last else torch.contiguous_format
    module = spec.build().to(memory_format=layout)
    parameters = list(module.parameters())
    rng = Rng((0, "benchmark"))

    def visit() -> None:
        train({"model": tree, "lr": 1e-4}, client, rng)

    def bare_visit() -> None:
        module.load_state_dict(tree)
        module.train()
        order = torch.randperm(len(rows), generator=rng.torch("batches"))
        for at in order.split(case.batch):
            inputs = normalize(images[at], MEAN, STD).contiguous(memory_format=layout)
            gradients = torch.autograd.grad(F.cross_entropy(module(inputs), labels[at]), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-1e-4)

    def evaluation() -> None:
        measured(task, learner, tested, 500, 0, case.tested)

    def bare_evaluation() -> None:
        module.eval()
        loss, correct = 0.0, 0
        with torch.inference_mode():
            for start in range(0, case.tested, 500):
                stop = min(start + 500, case.tested)
                inputs = normalize(images[start:stop], MEAN, STD).contiguous(memory_format=layout)
                outputs = module(inputs)
                loss += float(F.cross_entropy(outputs, labels[start:stop], reduction="sum"))
                correct += int((outputs.argmax(1) == labels[start:stop]).sum())

    return {"training": (visit, bare_visit), "evaluation": (evaluation, bare_evaluation)}


def seconds(work: Callable[[], object]) -> float:
    """The process time of one call, in seconds: all threads together."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description="The vision models against bare PyTorch.")
    parser.add_argument("models", nargs="*", help=f"any of: {', '.join(case.model for case in CASES)}")
    parser.add_argument("--pairs", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for case in CASES:
        if arguments.models and case.model not in arguments.models:
            continue
        for name, (ours, bare) in sides(case).items():
            ours(), bare()  # warm up
            ratios = []
            for turn in range(arguments.pairs):
                first, second = (ours, bare) if turn % 2 else (bare, ours)
                times = {first: seconds(first), second: seconds(second)}
                ratios.append(times[ours] / times[bare])
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            print(f"{case.model:20} {name:11} {middle:.3f}   {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
