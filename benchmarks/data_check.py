"""Measures `fedlens data check` of a COCO file with many boxes: seconds, and peak memory of the process.

    python -m benchmarks.data_check                          # 250,000, 500,000 and 1,000,000 boxes
    python -m benchmarks.data_check --boxes 1000000 --src OTHER/src --turns 3   # against another copy, in turns

1,000 images of 64 x 64 pixels share the boxes equally; every box is valid, and none occurs twice. Seconds are medians
over the turns, measured from outside, with the start of Python. A process that loads as many modules and checks
1,000 boxes is the first row: the others grow from there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = 1000
SIDE = 64
CLASSES = 10
CHECK = (
    "import sys; from fedlens.cli.main import main; "
    "sys.argv = ['fedlens', 'data', 'check', sys.argv[1], '--format', 'coco-json', '--json']; main()"
)


def write_folder(folder: Path, boxes: int) -> None:
    """Writes `images/*.png` and `instances.json`, with this many boxes in all."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for image in range(IMAGES):
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{image:04}.png")
    images = [
        {"id": image, "file_name": f"{image:04}.png", "width": SIDE, "height": SIDE}
        for image in range(IMAGES)
    ]
    names = [{"id": label + 1, "name": f"class {label}"} for label in range(CLASSES)]
    corners = rng.uniform(0, SIDE / 2, (boxes, 4)) + np.array([0, 0, 1, 1])
    labels = rng.integers(1, CLASSES + 1, boxes)
    annotations = [
        {
            "id": at,
            "image_id": at % IMAGES,
            "category_id": label,
            "bbox": box,
            "area": round(box[2] * box[3], 4),
            "iscrowd": 0,
            "segmentation": [],
        }
        for at, (label, box) in enumerate(zip(labels.tolist(), corners.round(4).tolist(), strict=True))
    ]
    content = {"images": images, "annotations": annotations, "categories": names}
    (folder / "instances.json").write_text(json.dumps(content))


def measured(folder: Path, source: Path) -> tuple[float, float, float]:
    """(seconds, seconds of all cores together, peak memory in MiB) of one check, with the package in `source`."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", CHECK, str(folder)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the check of {folder} with {source} failed")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Prints a row for each number of boxes and each copy of the package."""
    parser = argparse.ArgumentParser(description="The check of a COCO file with many boxes.")
    parser.add_argument("--boxes", type=int, nargs="*", default=[1000, 250_000, 500_000, 1_000_000])
    parser.add_argument(
        "--src", type=Path, nargs="*", default=[], help="the src of other copies to compare with"
    )
    parser.add_argument("--turns", type=int, default=1)
    asked = parser.parse_args()
    sources = [Path(__file__).resolve().parent.parent / "src", *(path.resolve() for path in asked.src)]
    with tempfile.TemporaryDirectory() as scratch:
        for boxes in asked.boxes:
            folder = Path(scratch) / str(boxes)
            # In a process of its own: a child's peak memory begins with that of its parent.
            writer = multiprocessing.get_context("spawn").Process(target=write_folder, args=(folder, boxes))
            writer.start()
            writer.join()
            turns = [[measured(folder, source) for source in sources] for _ in range(asked.turns)]
            for source, of_source in zip(sources, zip(*turns, strict=True), strict=True):
                seconds, busy, peak = (statistics.median(values) for values in zip(*of_source, strict=True))
                print(
                    f"{boxes:9,} boxes  {seconds:6.1f} s  {busy:6.1f} s CPU  {peak:6.0f} MiB  {source}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
