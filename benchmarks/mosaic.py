"""Times a mosaic batch against a plain loop over images that makes the same mosaic, in process time.

    python -m benchmarks.mosaic                # boxes and masks, at 192x256 and 512x512 (height x width)
    python -m benchmarks.mosaic --pairs 31

Both read a batch of images from memory, join them, move their boxes or masks, and normalize the pixels. The plain loop
is NumPy, image by image, with the same random numbers; that both make the same batch is checked first. They are timed
in turn, and each figure is the median of the ratios of a turn, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.vision import MEAN, STD, seconds
from fedlens.data.augmentation.augmented import Chain
from fedlens.data.augmentation.mosaic import Mosaic
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Examples
from fedlens.data.normalize import normalize
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.moved_targets import LEAST_SHARE, LEAST_SIDE, moved_boxes, moved_masks

CENTRE = (0.25, 0.75)
SHOWN = 12  # boxes an image, as in BCCD
MANY = 20  # batches a turn


@dataclass(frozen=True)
class Case:
    """What is joined: boxes or masks, the size of images, and of a batch."""

    targets: str
    height: int
    width: int
    batch: int


CASES = [Case(targets, *size) for targets in ("boxes", "masks") for size in ((192, 256, 8), (512, 512, 8))]


def examples(case: Case) -> Examples:
    """Random images with boxes or masks."""
    draw, n = np.random.RandomState(0), 4 * case.batch
    images = draw.randint(0, 256, (n, 3, case.height, case.width)).astype(np.uint8)
    if case.targets == "masks":
        return Examples(images, draw.randint(0, 12, (n, case.height, case.width)).astype(np.uint8))
    ends = draw.random_sample((2, n * SHOWN, 2)) * [case.width, case.height]
    boxes = np.concatenate([ends.min(0), ends.max(0)], 1).astype(np.float32)
    return Examples(images, Boxes(boxes, draw.randint(0, 3, n * SHOWN), np.arange(n + 1) * SHOWN))


def plain_mosaic(
    images: NDArray[np.uint8], masks: Any, boxes: Any, labels: Any, generator: torch.Generator
) -> tuple[NDArray[np.uint8], Any, list[Any], list[Any]]:
    """The mosaics of a batch, image by image: their pixels, masks, and lists of boxes and labels."""
    n, _, height, width = images.shape
    draws = torch.rand(3, n, generator=generator).double().numpy()
    others = torch.randint(0, n, (3, n), generator=generator).numpy()
    turns = torch.randint(0, 4, (n,), generator=generator).numpy()
    mixed = np.empty_like(images)
    mixed_masks = None if masks is None else np.empty_like(masks)
    mixed_boxes, mixed_labels = [], []
    for k in range(n):
        y = round(height * (CENTRE[0] + (CENTRE[1] - CENTRE[0]) * float(draws[0, k])))
        x = round(width * (CENTRE[0] + (CENTRE[1] - CENTRE[0]) * float(draws[1, k])))
        shown = [int(other) for other in others[:, k]]
        shown.insert(int(turns[k]), k)
        quadrants = ((0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height))
        parts, classes = [], []
        for q, (left, top, right, bottom) in enumerate(quadrants):
            row, column = (0 if q >= 2 else height) - y, (0 if q % 2 else width) - x
            rows, columns = slice(top + row, bottom + row), slice(left + column, right + column)
            mixed[k, :, top:bottom, left:right] = images[shown[q], :, rows, columns]
            if masks is not None:
                mixed_masks[k, top:bottom, left:right] = masks[shown[q], rows, columns]  # type: ignore[index]
                continue
            moved = boxes[shown[q]] - np.array([column, row, column, row], np.float32)
            whole = (moved[:, 2] - moved[:, 0]) * (moved[:, 3] - moved[:, 1])
            moved[:, ::2] = moved[:, ::2].clip(left, right)
            moved[:, 1::2] = moved[:, 1::2].clip(top, bottom)
            across, down = moved[:, 2] - moved[:, 0], moved[:, 3] - moved[:, 1]
            kept = (across >= LEAST_SIDE) & (down >= LEAST_SIDE) & (across * down >= LEAST_SHARE * whole)
            parts.append(moved[kept])
            classes.append(labels[shown[q]][kept])
        if masks is None:
            mixed_boxes.append(np.concatenate(parts))
            mixed_labels.append(np.concatenate(classes))
    return mixed, mixed_masks, mixed_boxes, mixed_labels


def sides(case: Case) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(fedlens, plain): each returns a batch of normalized images and their targets."""
    data = examples(case)
    tensors = data.tensors()
    chain = Chain((Mosaic(1.0, CENTRE),), moved_boxes if case.targets == "boxes" else moved_masks)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: case.batch]
    rows = order.numpy()

    def ours() -> Any:
        images, targets = chain(*tensors.batch(order), torch.Generator().manual_seed(0))
        return normalize(images, MEAN, STD), targets

    def plain() -> Any:
        generator = torch.Generator().manual_seed(0)
        images = data.inputs[rows]
        if case.targets == "masks":
            mixed, masks, _, _ = plain_mosaic(images, data.targets[rows], None, None, generator)
            return normalize(torch.from_numpy(mixed), MEAN, STD), torch.from_numpy(masks)
        boxes = [data.targets.boxes_of(row) for row in rows]
        labels = [data.targets.labels_of(row) for row in rows]
        mixed, _, boxes, labels = plain_mosaic(images, None, boxes, labels, generator)
        image = np.repeat(np.arange(len(boxes)), [len(each) for each in boxes])
        joined = [torch.from_numpy(np.concatenate(each)) for each in (boxes, labels)]
        targets = BoxBatch(*joined, torch.from_numpy(image), len(boxes))
        return normalize(torch.from_numpy(mixed), MEAN, STD), targets

    return ours, plain


def check_same(ours: Any, plain: Any) -> None:
    """Raises `AssertionError` if two batches differ by more than the rounding of boxes."""
    assert torch.equal(ours[0], plain[0])
    if not isinstance(ours[1], BoxBatch):
        assert torch.equal(ours[1], plain[1])
        return
    assert torch.equal(ours[1].image, plain[1].image)
    assert torch.equal(ours[1].labels, plain[1].labels)
    torch.testing.assert_close(ours[1].boxes, plain[1].boxes)


def ratios(case: Case, pairs: int) -> list[float]:
    """The time of fedlens as a share of that of the plain loop, turn by turn."""
    ours, plain = sides(case)
    check_same(ours(), plain())

    def repeated(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(MANY):
                work()

        return run

    works = repeated(ours), repeated(plain)
    measured = []
    for turn in range(pairs):
        times = {}
        for at in (0, 1) if turn % 2 else (1, 0):
            times[at] = seconds(works[at])
        measured.append(times[0] / times[1])
    return measured


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description="A mosaic batch against a plain loop.")
    parser.add_argument("--pairs", type=int, default=15, help="turns (default: 15)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        values = ratios(case, arguments.pairs)
        size = f"{case.batch} x {case.height}x{case.width}"
        print(
            f"{case.targets:6} {size:14} {statistics.median(values):.3f}   {min(values):.3f} to {max(values):.3f}"
        )


if __name__ == "__main__":
    main()
