"""What the layers of stacked clients share in a forward pass: the number of clients, and their dropout masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Masks:
    """The dropout masks of a step, each client's from a generator of its own, drawn in the order of the layers."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self.generators = generators
        self.begin([], 0)

    def begin(self, counts: Sequence[int], size: int) -> None:
        """A new step, of clients with so many examples, in batches that are padded to `size`."""
        self.counts, self.drawn, self.next, self.size = counts, list[Tensor](), 0, size

    def again(self) -> None:
        """The same masks once more."""
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
            return torch.zeros((), dtype=like.dtype, device=like.device)  # nothing is drawn for it either
        if like.shape[1] != self.size:
            raise RuntimeError("dropout of values whose first axis is not that of the batch")
        shape = like.shape[2:] if isinstance(layer, nn.Dropout) else (like.shape[2], *[1] * (like.dim() - 3))
        mask = torch.zeros(*like.shape[:2], *shape, dtype=like.dtype)
        for k, count in enumerate(self.counts):
            mask[k, :count].copy_(
                torch.empty(count, *shape, dtype=like.dtype).bernoulli_(keep, generator=self.generators[k])
            )
            # What fills a batch up is its first example, and is to remain that: where it is dropped the model may have
            # no slope, and NaN times a weight of 0 is NaN.
            mask[k, count:] = mask[k, 0]
        return (mask / keep).to(like.device)


@dataclass
class Stack:
    """What the layers of a forward pass have to know: how many clients there are, and their masks.

    Attributes:
        products: where it is a list, a linear layer leaves there (weight [A, O, I], left [A, O, N], right [A, N, I]) in
            place of the gradient of its weight, which is left @ right: whoever only wants to take a step along it adds
            the product to the weight, and the gradient is never written.
    """

    masks: Masks
    clients: int = 0
    products: list[tuple[Tensor, Tensor, Tensor]] | None = None
