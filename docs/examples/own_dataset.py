"""A dataset of one's own, from arrays."""

import numpy as np

import fedlens


def stripes(*, size: int = 8):
    """300 grey images of stripes, taken at three hospitals: horizontal ones and vertical ones."""
    draw = np.random.RandomState(0)
    labels = np.arange(300) % 2
    lines = draw.randint(0, 256, (300, size, 1), np.uint8)
    images = np.where(labels[:, None, None] == 0, lines, lines.transpose(0, 2, 1))  # uint8 [n, H, W]
    hospitals = np.array(["Aachen", "Bonn", "Celle"])[draw.randint(0, 3, 300)]
    return fedlens.dataset(
        images[:240],
        labels[:240],
        images[240:],
        labels[240:],
        classes=["horizontal", "vertical"],
        clients=hospitals[:240],
    )
