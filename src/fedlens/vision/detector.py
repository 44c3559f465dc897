"""The base class of detectors whose undecoded outputs can be exported."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from fedlens.base.errors import ConfigError


class NoRaw(ConfigError):
    """A detector has no undecoded outputs of fixed shapes."""


class Detector(nn.Module):
    """A network that finds objects; every detector of fedlens is one.

    In training mode it is called as `module(images, targets)` and returns its losses by name, each a 0-dim tensor.
    In evaluation mode it is called as `module(images)` and returns a list with one dictionary per image. Images are
    one tensor float32 [n, C, H, W], normalized as the dataset is. Targets are a list with one dictionary per image:
    `boxes`, float32 [k, 4], left, top, right and bottom in pixels, and `labels`, int64 [k], classes counted from 0. An
    answer has both and `scores`, float32 [k].

    A module of a user's own that is called in this way need not inherit from this class. Only `raw` is missing then,
    so it cannot be exported as a graph.

    Attributes:
        plain_targets: whether it takes the targets in CPU memory also where the images are on a GPU, to read their
            values without waiting for it.
    """

    plain_targets: ClassVar[bool] = False

    @abstractmethod
    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs by name before boxes are decoded and suppressed: fixed shapes, no look at values.

        Raises `NoRaw` for a detector whose later layers depend on the boxes of earlier ones.
        """

    def notes(self, boxes: Tensor) -> list[str]:
        """Sentences for the user about the boxes float32 [m, 4] of the training images, said before training."""
        return []
