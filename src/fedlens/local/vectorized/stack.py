"""State that the layers of stacked clients share in a forward pass: the number of clients, and dropout masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedlens.core.random import Rng

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def mask_generator(rng: Rng, device: torch.device) -> torch.Generator:
    """The generator of a client's dropout masks, on the device of the model."""
    return torch.Generator(device).manual_seed(rng.seed("torch"))


class Masks:
    """The dropout masks of a step, drawn in the order of the layers; each client has its own generator."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self.generators = generators
        self.begin([], 0)

    def begin(self, counts: Sequence[int], size: int) -> None:
        """Begins a step of clients with these numbers of examples, in batches padded to `size`."""
        self.counts, self.drawn, self.next, self.size = counts, list[Tensor](), 0, size

    def again(self) -> None:
        """Returns the same masks again."""
        self.next = 0

    def mask(self, like: Tensor, layer: nn.Module) -> Tensor:
        """The next mask, for values [A, B, ...]: 0, or 1 / (1 - p)."""
        if self.next == len(self.drawn):
            self.drawn.append(self._draw(like, layer))
        self.next += 1
        return self.drawn[self.next - 1]

    def _draw(self, like: Tensor, layer: nn.Module) -> Tensor:
        assert isinstance(layer, DROPOUTS)
        keep = 1 - layer.p
        if not keep:
            return torch.zeros((), dtype=like.dtype, device=like.device)  # nothing is drawn for p = 1
        if like.shape[1] != self.size:
            raise RuntimeError("dropout of values whose first axis is not the batch")
        shape = like.shape[2:] if isinstance(layer, nn.Dropout) else (like.shape[2], *[1] * (like.dim() - 3))
        mask = torch.zeros(*like.shape[:2], *shape, dtype=like.dtype, device=like.device)
        for k, count in enumerate(self.counts):
            mask[k, :count].bernoulli_(keep, generator=self.generators[k])
            # Padding repeats the first example with its mask: with another mask the gradient may be NaN, and NaN
            # times a weight of 0 is NaN.
            if count < len(mask[k]):
                mask[k, count:] = mask[k, 0]
        return mask.div_(keep)


@dataclass
class Stack:
    """State that the layers of a forward pass share: the number of clients, and their masks.

    Attributes:
        products: if a list, a linear layer appends (weight [A, O, I], left [A, O, N], right [A, N, I]) instead of
            computing the gradient of its weight, which is left @ right. A plain step adds the product to the weight, so
            the gradient is never stored.
    """

    masks: Masks
    clients: int = 0
    products: list[tuple[Tensor, Tensor, Tensor]] | None = None
