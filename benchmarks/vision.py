"""Times a training visit and an evaluation of the vision models against a bare PyTorch loop, in process time.

    python -m benchmarks.vision                          # all cases, training and evaluation
    python -m benchmarks.vision resnet20 --pairs 9 --threads 2
    python -m benchmarks.vision unet yolov5n ssdlite mosaic

Both sides use the same module, images in memory, batches, threads and memory layout (the one that fedlens chooses).
They are timed in turn, and each figure is the median of the ratios of a turn, with the smallest and the largest, and
the goal. The case `mosaic` trains YOLOv5n on mosaics, which the bare loop makes by hand. An evaluation is compared
with:

- classification: a loop that sums loss and right answers;
- segmentation: the forward pass alone;
- detection: the network alone (`raw`), without decoding, suppression and matching. The network is trained for
  `--warm` steps first: one with drawn weights finds thousands of boxes in each image, which no trained one does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.core.arithmetic import Arithmetic
from fedlens.core.modules import loadable
from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.data.augmentation.augment import AUGMENTS
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.boxes import Boxes
from fedlens.data.client_datasets import ClientDataset
from fedlens.data.dataset import VOID, Examples
from fedlens.data.normalize import normalize
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.models.registry import MODELS
from fedlens.tasks.central_evaluation import measured
from fedlens.tasks.registry import TASKS
from fedlens.tasks.task import Task

MEAN, STD = (0.5,) * 3, (0.5,) * 3
RATE = 1e-4
EVALUATED = 500  # images of a batch of an evaluation, at most
OBJECTS = 12  # of an image

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model, its images, the sizes of batches, and the goals of training and evaluation.

    `fewer` divides the number of turns. `mosaic` trains on mosaics.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    classes: int
    steps: int
    batch: int
    tested: int
    goals: tuple[float, float]
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    fewer: int = 1
    mosaic: bool = False


MOBILE = {"backbone": "mobilenet-v2"}
CASES = [
    Case("resnet20", "classification", (3, 32, 32), 10, 16, 32, 500, (1.05, 1.05)),
    Case("mobilenet-v3-large", "classification", (3, 224, 224), 1000, 4, 16, 32, (1.05, 1.05)),
    Case("unet", "segmentation", (3, 128, 160), 11, 4, 8, 32, (1.05, 1.15), settings=MOBILE),
    Case("unet-512", "segmentation", (3, 512, 512), 21, 2, 2, 4, (1.05, 1.15), "unet", MOBILE, fewer=2),
    Case("yolov5n", "detection", (3, 192, 256), 3, 4, 8, 64, (1.05, 1.30)),
    Case("ssdlite", "detection", (3, 320, 320), 3, 4, 8, 32, (1.05, 1.30)),
    Case("mosaic", "detection", (3, 192, 256), 3, 4, 8, 0, (1.10, 0.0), "yolov5n", mosaic=True),
]


def examples(case: Case) -> Examples:
    """Random images with targets of the case's kind, the same in every run."""
    n = max(case.steps * case.batch, case.tested)
    g = torch.Generator().manual_seed(0)
    _, height, width = case.shape
    images = torch.randint(0, 256, (n, *case.shape), dtype=torch.uint8, generator=g)
    if case.kind == "segmentation":
        masks = torch.randint(0, case.classes + 1, (n, height, width), dtype=torch.uint8, generator=g)
        return Examples(images, masks.where(masks < case.classes, VOID))
    if case.kind == "classification":
        return Examples(images, torch.randint(0, case.classes, (n,), generator=g))
    labels = torch.randint(0, case.classes, (n * OBJECTS,), generator=g)
    corner = torch.rand(n * OBJECTS, 2, generator=g) * torch.tensor([width - 64.0, height - 64.0])
    sides = 12 + torch.rand(n * OBJECTS, 2, generator=g) * 48
    boxes = torch.cat([corner, corner + sides], 1).numpy()
    return Examples(images, Boxes(boxes, labels.numpy(), np.arange(0, n * OBJECTS + 1, OBJECTS)))


def bare_targets(case: Case, data: Examples) -> Any:
    """The targets as a bare loop has them in memory: a tensor, or a dictionary for each image."""
    if case.kind == "classification":
        return data.targets
    if case.kind == "segmentation":
        return data.targets.long()
    return [
        {
            "boxes": torch.from_numpy(data.targets.boxes_of(k)),
            "labels": torch.from_numpy(data.targets.labels_of(k)),
        }
        for k in range(len(data))
    ]


def bare_loss(case: Case, module: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
    """The loss of a batch."""
    if case.kind == "detection":
        return torch.stack(list(module(inputs, targets).values())).sum()
    if case.kind == "segmentation":
        return F.cross_entropy(module(inputs), targets, ignore_index=VOID)
    return F.cross_entropy(module(inputs), targets)


def bare_mosaic(images: Tensor, targets: list[dict[str, Tensor]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Four images of the batch joined at a random point, for each image of it."""
    n, _, height, width = images.shape
    joined, moved = torch.empty_like(images), []
    for k in range(n):
        y, x = (round(side * (0.25 + 0.5 * float(torch.rand(())))) for side in (height, width))
        shown = [k, *torch.randint(0, n, (3,)).tolist()]
        boxes, labels = [], []
        for q, (left, top, right, bottom) in enumerate(
            ((0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height))
        ):
            # What is added to a place of the result to find it in the image.
            down, across = (0 if q >= 2 else height) - y, (0 if q % 2 else width) - x
            part = images[shown[q], :, top + down : bottom + down, left + across : right + across]
            joined[k, :, top:bottom, left:right] = part
            target = targets[shown[q]]
            whole = target["boxes"] - torch.tensor([across, down] * 2)
            cut = torch.cat(
                [
                    whole[:, :2].maximum(torch.tensor([left, top])),
                    whole[:, 2:].minimum(torch.tensor([right, bottom])),
                ],
                1,
            )
            sides, area = cut[:, 2:] - cut[:, :2], (whole[:, 2:] - whole[:, :2]).prod(1)
            kept = (sides >= 2).all(1) & (sides.prod(1) >= 0.1 * area)
            boxes.append(cut[kept])
            labels.append(target["labels"][kept])
        moved.append({"boxes": torch.cat(boxes), "labels": torch.cat(labels)})
    return joined, moved


def sides(case: Case, warm: int) -> dict[str, tuple[Work, Work, float]]:
    """(fedlens, bare, goal) for training and for evaluation."""
    spec = ModelSpec(
        MODELS.find(case.model or case.name), case.name, case.settings, case.shape, case.classes, 0
    )
    data, rows = examples(case), torch.arange(case.steps * case.batch)
    images, targets = data.inputs, bare_targets(case, data)
    task: Task = TASKS.find(case.kind)()
    augment = Chain((AUGMENTS.find("mosaic")(case.shape),), task.move) if case.mosaic else None
    trained = ClientDataset(data, rows, MEAN, STD, augment)
    tested = ClientDataset(data, None, MEAN, STD)
    client = Client(0, trained, {}, Secrets((0,)), {}, torch.device("cpu"), Arithmetic(channels_last="auto"))
    tree = tree_of(spec.build())
    train = Train(spec, task, LocalSettings(lr=RATE, batch_size=case.batch), ClientRule())
    learner = loadable(spec, client)
    last = client.arithmetic.lays_out(spec.build(), client.device)
    layout = torch.channels_last if last else torch.contiguous_format
    module = spec.build().to(memory_format=layout)
    parameters = list(module.parameters())
    rng = Rng((0, "benchmark"))

    def visit() -> None:
        train({"model": tree, "lr": RATE}, client, rng)

    def at(index: Tensor) -> Any:
        return targets[index] if isinstance(targets, Tensor) else [targets[k] for k in index.tolist()]

    def bare_visit() -> None:
        module.load_state_dict(tree)
        module.train()
        order = torch.randperm(len(rows), generator=rng.torch("batches"))
        for index in order.split(case.batch):
            batch, truth = images[index], at(index)
            if case.mosaic:
                batch, truth = bare_mosaic(batch, truth)
            inputs = normalize(batch, MEAN, STD).contiguous(memory_format=layout)
            gradients = torch.autograd.grad(bare_loss(case, module, inputs, truth), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-RATE)

    def evaluation() -> None:
        task.metrics(measured(task, learner, tested, size, 0, case.tested))

    def bare_evaluation() -> None:
        module.eval()
        loss, correct = 0.0, 0
        with torch.inference_mode():
            for start in range(0, case.tested, size):
                stop = min(start + size, case.tested)
                inputs = normalize(images[start:stop], MEAN, STD).contiguous(memory_format=layout)
                if case.kind == "detection":
                    module.raw(inputs)
                    continue
                outputs = module(inputs)
                if case.kind == "classification":
                    loss += float(F.cross_entropy(outputs, targets[start:stop], reduction="sum"))
                    correct += int((outputs.argmax(1) == targets[start:stop]).sum())

    size = EVALUATED if case.kind == "classification" else case.batch
    found = {"training": (visit, bare_visit, case.goals[0])}
    if case.tested:
        if case.kind == "detection":
            fitted(case, module, images, at, warm)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        learner.module.load_state_dict(weights)
        found["evaluation"] = (evaluation, bare_evaluation, case.goals[1])
    return found


def fitted(case: Case, module: nn.Module, images: Tensor, at: Callable[[Tensor], Any], steps: int) -> None:
    """Trains the module on its first batch, so that it finds about as many boxes as a trained one."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    index = torch.arange(case.batch)
    inputs = normalize(images[index], MEAN, STD)
    for _ in range(steps):
        optimizer.zero_grad()
        bare_loss(case, module, inputs, at(index)).backward()
        optimizer.step()


def seconds(work: Work) -> float:
    """The process time of one call, in seconds: all threads together."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description="The vision models against bare PyTorch.")
    parser.add_argument("cases", nargs="*", help=f"any of: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--pairs", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: 1)")
    parser.add_argument(
        "--warm", type=int, default=60, help="steps before a detector is evaluated (default: 60)"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.threads)
    for case in CASES:
        if arguments.cases and case.name not in arguments.cases:
            continue
        for name, (ours, bare, goal) in sides(case, arguments.warm).items():
            ours(), bare()  # warm up
            ratios = []
            for turn in range(max(3, arguments.pairs // case.fewer)):
                first, second = (ours, bare) if turn % 2 else (bare, ours)
                times = {first: seconds(first), second: seconds(second)}
                ratios.append(times[ours] / times[bare])
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            print(
                f"{case.name:20} {name:11} {middle:.3f}   {low:.3f} to {high:.3f}   goal {goal:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
