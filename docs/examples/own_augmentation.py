"""Augmentations of one's own: inverted brightness, and images upside down."""

import torch

from fedlens.parts import Change


def inverted(*, p: float = 0.5):
    """Inverts the brightness of each image with probability p."""

    def invert(images, targets, generator):
        """The images uint8 [n, C, H, W] and their targets; no pixel moves."""
        chosen = torch.rand(len(images), generator=generator) < p
        return torch.where(chosen[:, None, None, None], 255 - images, images), targets

    return invert


def upside_down(*, p: float = 0.5):
    """Flips each image top to bottom with probability p."""

    def flip(images, targets, generator):
        """The images, their targets as they are, and how pixels moved: the task moves masks and boxes by it."""
        chosen = torch.rand(len(images), generator=generator) < p
        flipped = torch.where(chosen[:, None, None, None], images.flip(2), images)
        height, width = images.shape[2:]
        none = torch.zeros(len(images), dtype=torch.bool)
        return flipped, targets, Change.flips(none, (height, width), upended=chosen)

    return flip
