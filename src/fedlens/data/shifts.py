"""How each client sees its images: brightness, blur, rotation and noise of its own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def shifted(images: Tensor, by: Mapping[str, Tensor], positions: Tensor) -> Tensor:
    """The images as their clients see them.

    Args:
        images: uint8 [n, C, H, W].
        by: float32 [n] by name.
        positions: int64 [n], where each image stands in the training split.

    Returns:
        uint8 [n, C, H, W].
    """
    raise NotImplementedError
