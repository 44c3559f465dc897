"""The base class of detectors whose outputs can be exported before they are decoded."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn


class Detector(nn.Module):
    """A detector: in training `module(images, targets)` gives named losses, in evaluation `module(images)` boxes."""

    @abstractmethod
    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs by name before they are decoded, of fixed shapes; PyTorch's exporters trace it."""

    def notes(self, boxes: Tensor) -> list[str]:
        """Sentences for the user about the boxes [m, 4] that it is to be trained on."""
        return []
