"""The base class of images that are made when a batch is read: decoded from files, or drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class LazyImages(ABC):
    """Images of one shape. They can be used in place of an array uint8 [n, C, H, W].

    Attributes:
        changing: whether `draw` makes other images each time, so that none can be kept from epoch to epoch.
    """

    changing: ClassVar[bool] = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of images."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(n, C, H, W), or (n, H, W) of masks."""

    @property
    def dtype(self) -> Any:
        """uint8, always."""
        return np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        """The bytes of all images in memory."""
        return int(np.prod(self.shape))

    @property
    @abstractmethod
    def held_nbytes(self) -> int:
        """The bytes that are in memory now."""

    @abstractmethod
    def take(self, index: NDArray[Any]) -> NDArray[np.uint8]:
        """uint8 [k, ...]: the images at the positions `index`, int64 [k]; the same ones each time."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of all that the images depend on."""

    @abstractmethod
    def subset(self, rows: NDArray[Any]) -> LazyImages:
        """The images at `rows`, int64 [k]."""

    def draw(self, index: NDArray[Any], generator: torch.Generator) -> NDArray[np.uint8]:
        """The images at these positions for a training step.

        uint8 [k, C, H, W], or [k, views, C, H, W] if each view is an image of its own.
        """
        return self.take(index)

    def views(self, index: NDArray[Any]) -> NDArray[np.uint8]:
        """The images at these positions in the form of `draw`, the same ones each time."""
        return self.take(index)
