"""A model of one's own, as a class."""

import torch
from torch import nn


class TwoLayers(nn.Module):
    """Two linear layers. fedlens passes `input_shape` and `classes`; `hidden` is a setting."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, hidden: int = 32) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.first = nn.Linear(channels * height * width, hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images float32 [n, channels, height, width] to one number a class, [n, classes]."""
        return self.last(torch.relu(self.first(images.flatten(1))))
