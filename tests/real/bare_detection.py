"""YOLOv5n on BCCD as a bare PyTorch loop, to compare `bccd/centralized` with.

    python -m tests.real.bare_detection --seed 0 --epochs 15 --threads 1

It reads files with Pillow and the standard library, and scores with pycocotools. Of fedlens it takes the network alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedlens.models.yolov5.detector import yolov5n

CLASSES = ("RBC", "WBC", "Platelets")
HEIGHT, WIDTH = 192, 256
BATCH, RATE, DECAY = 8, 2e-3, 0.01
MOMENTS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as fedlens's reader has them

Targets = list[dict[str, Tensor]]


def read(root: Path, splits: list[str]) -> tuple[Tensor, Targets]:
    """(images uint8 [n, 3, H, W], boxes and labels of each) of the published splits."""
    folder = root / "BCCD"
    images, targets = [], []
    for split in splits:
        for name in (folder / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
            with Image.open(folder / "JPEGImages" / f"{name}.jpg") as image:
                scale = torch.tensor([WIDTH / image.width, HEIGHT / image.height] * 2)
                images.append(
                    np.asarray(image.convert("RGB").resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
                )
            boxes, labels = [], []
            for each in ElementTree.parse(folder / "Annotations" / f"{name}.xml").iter("object"):
                left, top, right, bottom = (
                    float(each.findtext(f"bndbox/{corner}") or "nan")
                    for corner in ("xmin", "ymin", "xmax", "ymax")
                )
                if right > left and bottom > top:
                    boxes.append((left - 1, top - 1, right, bottom))
                    labels.append(CLASSES.index(each.findtext("name") or ""))
            targets.append(
                {
                    "boxes": torch.tensor(boxes).view(-1, 4) * scale,
                    "labels": torch.tensor(labels, dtype=torch.int64),
                }
            )
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), targets


def flipped(images: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
    """Each image mirrored with probability 1/2 left to right, and with probability 1/2 top to bottom."""
    images, moved = images.clone(), []
    for k, target in enumerate(targets):
        boxes = target["boxes"]
        across, down = (torch.rand(2) < 0.5).tolist()
        if across:
            images[k] = images[k].flip(2)
            boxes = torch.stack([WIDTH - boxes[:, 2], boxes[:, 1], WIDTH - boxes[:, 0], boxes[:, 3]], 1)
        if down:
            images[k] = images[k].flip(1)
            boxes = torch.stack([boxes[:, 0], HEIGHT - boxes[:, 3], boxes[:, 2], HEIGHT - boxes[:, 1]], 1)
        moved.append({"boxes": boxes, "labels": target["labels"]})
    return images, moved


def scores(network: torch.nn.Module, images: Tensor, targets: Targets) -> dict[str, float]:
    """`map` and `map50`, as pycocotools computes them."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    network.eval()
    found: Targets = []
    with torch.inference_mode():
        for at in torch.arange(len(images)).split(8):
            found += network(images[at])

    def rows(answers: Targets) -> list[dict[str, object]]:
        return [
            {
                "image_id": k,
                "category_id": int(label),
                "bbox": [
                    x := float(box[0]),
                    y := float(box[1]),
                    w := float(box[2]) - x,
                    h := float(box[3]) - y,
                ],
                "area": w * h,
                "iscrowd": 0,
                **({"score": float(answer["scores"][at])} if "scores" in answer else {}),
            }
            for k, answer in enumerate(answers)
            for at, (box, label) in enumerate(zip(answer["boxes"], answer["labels"], strict=True))
        ]

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": [{"id": k} for k in range(len(targets))],
            "categories": [{"id": k, "name": name} for k, name in enumerate(CLASSES)],
            "annotations": [{**row, "id": k + 1} for k, row in enumerate(rows(targets))],
        }
        truth.createIndex()
        answers = rows(found)
        if not answers:
            return {"map": 0.0, "map50": 0.0}
        judge = COCOeval(truth, truth.loadRes(answers), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {"map": float(judge.stats[0]), "map50": float(judge.stats[1])}


def train(root: Path, seed: int, epochs: int, threads: int = 1) -> dict[str, float]:
    """The scores of the test split after the last epoch."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    (images, targets), (test_images, test_targets) = read(root, ["train", "val"]), read(root, ["test"])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in MOMENTS)
    test_scaled = (test_images.float() / 255 - mean) / std
    network = yolov5n((3, HEIGHT, WIDTH), len(CLASSES))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    steps = epochs * -(-len(images) // BATCH)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(epochs):
        network.train()
        for at in torch.randperm(len(images)).split(BATCH):
            batch, boxes = flipped(images[at], [targets[k] for k in at.tolist()])
            loss = torch.stack(list(network((batch.float() / 255 - mean) / std, boxes).values())).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    return scores(network, test_scaled, test_targets)


def main() -> None:
    """Prints both scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDLENS_DATA", ".")))
    given = parser.parse_args()
    found = train(given.data, given.seed, given.epochs, given.threads)
    sys.stdout.write(f"map50 {found['map50']:.4f} map {found['map']:.4f}\n")


if __name__ == "__main__":
    main()
