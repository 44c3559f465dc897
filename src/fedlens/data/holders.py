"""What an operation finds as `client.data`: a view of the examples of one holder, made into batches of floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlens.core.protocol import ClientId
from fedlens.core.seeding import Rng
from fedlens.data.federated import FederatedData, TensorExamples
from fedlens.data.transforms import normalize, pad_crop_flip

Augment = Literal["none", "pad-crop-flip"]

_WHOLE = 2**26  # bytes of floats up to which a client's images are normalized at once, not batch by batch


@dataclass(frozen=True)
class Holding:
    """The examples of one holder.

    `indices` are the positions of its examples, int64 [n]; None means all of `examples`.
    """

    examples: TensorExamples
    indices: Tensor | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment = "none"

    def __len__(self) -> int:
        return len(self.examples) if self.indices is None else len(self.indices)

    def labels(self) -> Tensor:
        """int64 [n]: the labels, in the holder's order."""
        return self.examples.targets if self.indices is None else self.examples.targets[self.indices]

    def stretch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Normalized images float32 [k, C, H, W] and labels of the positions start to stop, never augmented."""
        if self.indices is None:
            images, labels = self.examples.inputs[start:stop], self.examples.targets[start:stop]
        else:
            taken = self.examples.take(self.indices[start:stop])
            images, labels = taken.inputs, taken.targets
        return normalize(images, self.mean, self.std), labels

    def batches(self, size: int, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, one epoch after the other, each in a new order; the last of an epoch may be short.

        The order of an epoch is `torch.randperm(n)` from `rng.torch("batches")`; where one batch holds everything,
        the order is left as it is and nothing is drawn.
        """
        n = len(self)
        values = self.examples.inputs[0].numel() if n else 0
        generator = rng.torch("batches")
        if self.augment == "none" and n * values * 4 <= _WHOLE:
            yield from self._from_memory(size, generator)
        augmenting = rng.torch("augment")
        while True:
            order = self._order(n, size, generator)
            for start in range(0, n, size):
                at = order[start : start + size]
                taken = self.examples.take(at if self.indices is None else self.indices[at])
                images = taken.inputs
                if self.augment == "pad-crop-flip":
                    images = pad_crop_flip(images, augmenting)
                yield normalize(images, self.mean, self.std), taken.targets

    def _from_memory(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self)
        images, labels = self.stretch(0, n)
        while True:
            if size >= n:
                yield images, labels
                continue
            order = self._order(n, size, generator)
            shuffled, shuffled_labels = images.index_select(0, order), labels.index_select(0, order)
            for start in range(0, n, size):
                yield shuffled[start : start + size], shuffled_labels[start : start + size]

    @staticmethod
    def _order(n: int, size: int, generator: torch.Generator) -> Tensor:
        return torch.arange(n) if size >= n else torch.randperm(n, generator=generator)


@dataclass(frozen=True)
class Holders:
    """Finds the data of every client, and of the server: `@test`, `@validation`, and `@train`, all clients' pooled."""

    data: FederatedData
    augment: Augment = "none"

    def holder(self, client: ClientId) -> Holding:
        """The data of this holder. Raises `KeyError` for one that there is not."""
        data = self.data
        if not isinstance(client, str):
            return Holding(data.train, data.client_indices(client), data.mean, data.std, self.augment)
        if client == "@train":
            return Holding(data.train, data.indices, data.mean, data.std, self.augment)
        examples = {"@test": data.test, "@validation": data.validation}[client]
        if examples is None:
            raise KeyError(client)
        return Holding(examples, None, data.mean, data.std)

    def held(self) -> dict[str, int]:
        """How many examples the server can measure on, by name."""
        sizes = {"@test": len(self.data.test), "@train": len(self.data.indices)}
        if self.data.validation is not None:
            sizes["@validation"] = len(self.data.validation)
        return sizes
