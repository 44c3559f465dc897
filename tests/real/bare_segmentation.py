"""U-Net with MobileNetV2 on CamVid as a bare PyTorch loop, to compare `camvid/drives-centralized` with.

    python -m tests.real.bare_segmentation --seed 0 --epochs 5 --threads 1

It imports torch, segmentation-models-pytorch and Pillow, and nothing of fedlens.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

CLASSES, VOID = 11, 255
HEIGHT, WIDTH = 120, 160
BATCH, RATE, DECAY, POWER = 8, 1e-3, 0.01, 0.9
MOMENTS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as fedlens's reader has them


def read(root: Path, splits: list[str]) -> tuple[Tensor, Tensor]:
    """(images uint8 [n, 3, H, W], masks int64 [n, H, W]) of the published splits."""
    images, masks = [], []
    for split in splits:
        for path in sorted((root / "CamVid" / split).glob("*.png")):
            with Image.open(path) as image:
                images.append(
                    np.asarray(image.convert("RGB").resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR))
                )
            with Image.open(root / "CamVid" / f"{split}annot" / path.name) as mask:
                masks.append(np.asarray(mask.resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)))
    ids = torch.from_numpy(np.stack(masks)).long()
    ids[ids >= CLASSES] = VOID
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), ids


def logits(network: torch.nn.Module, images: Tensor) -> Tensor:
    """Those of a network whose sides are multiples of 32."""
    down, across = -HEIGHT % 32, -WIDTH % 32
    return network(F.pad(images, (0, across, 0, down)))[..., :HEIGHT, :WIDTH]


def mean_iou(network: torch.nn.Module, images: Tensor, masks: Tensor) -> float:
    """The mean over the classes that occur in the truth or in the answer."""
    network.eval()
    confusion = torch.zeros(CLASSES * CLASSES, dtype=torch.int64)
    with torch.inference_mode():
        for at in torch.arange(len(images)).split(16):
            answer, truth = logits(network, images[at]).argmax(1), masks[at]
            labelled = truth != VOID
            confusion += torch.bincount(truth[labelled] * CLASSES + answer[labelled], minlength=CLASSES**2)
    matrix = confusion.view(CLASSES, CLASSES).double()
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    return float((matrix.diagonal() / union)[union > 0].mean())


def train(root: Path, seed: int, epochs: int, threads: int = 1) -> float:
    """The mean IoU of the test split after the last epoch."""
    import segmentation_models_pytorch as smp

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    (images, masks), (test_images, test_masks) = read(root, ["train", "val"]), read(root, ["test"])
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in MOMENTS)
    scaled, test_scaled = ((each.float() / 255 - mean) / std for each in (images, test_images))
    network = smp.Unet("mobilenet_v2", encoder_weights=None, classes=CLASSES)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    steps = epochs * -(-len(images) // BATCH)
    rates = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, power=POWER)
    for _ in range(epochs):
        network.train()
        for at in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(logits(network, scaled[at]), masks[at], ignore_index=VOID)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    return mean_iou(network, test_scaled, test_masks)


def main() -> None:
    """Prints the mean IoU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDLENS_DATA", ".")))
    given = parser.parse_args()
    sys.stdout.write(f"mean_iou {train(given.data, given.seed, given.epochs, given.threads):.4f}\n")


if __name__ == "__main__":
    main()
