"""The data of each client (`client.data`): a view of its examples, read as batches of floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.core.protocol import ClientDataSource, ClientExamples, ClientId
from fedlens.core.random import Rng
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.shifts import shifted
from fedlens.data.transforms import Augment, normalize

_WHOLE = 2**26  # bytes of floats up to which a client's images are normalized at once, not per batch


@dataclass(frozen=True)
class ClientDataset(ClientExamples):
    """The examples of one client, or of the server.

    Args:
        examples: what `indices` point into.
        indices: the positions of its examples, int64 [n]; None means all of `examples`.
        mean, std: for `normalize`.
        augment: the augmentation while training, uint8 [k, C, H, W] to the same.
        features: the shifts of the images at `indices`, float32 [1] for all of them or [n], by name; see
            `fedlens.data.shifts`.
        validation: the examples that this client holds out, if clients do.
    """

    examples: Examples
    indices: Tensor | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment | None = None
    features: Mapping[str, Tensor] = field(default_factory=dict)
    validation: ClientDataset | None = None

    def __len__(self) -> int:
        # `len` of a tensor takes ten times as long, and this is called several times per client.
        return len(self.examples) if self.indices is None else self.indices.numel()

    def labels(self) -> Tensor:
        """int64 [n]: the labels, in the order of `indices`."""
        targets: Tensor = self.examples.targets
        return targets if self.indices is None else targets[self.indices]

    def take(self, at: Tensor) -> ClientDataset:
        """The examples at the positions `at`, int64 [k], which may repeat."""
        features = {name: values[at] if len(values) > 1 else values for name, values in self.features.items()}
        indices = at if self.indices is None else self.indices[at]
        return replace(self, indices=indices, features=features)

    def stretch(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Normalized images float32 [k, C, H, W] and labels at the positions start to stop, never augmented."""
        if self.indices is None:
            images, labels = self.examples.stretch(start, stop)
        elif self.features:
            images, labels = self._images(torch.arange(start, min(stop, len(self))))
        else:
            images, labels = self.examples.batch(self.indices[start:stop])
        return normalize(images, self.mean, self.std), labels

    def batches(self, size: int, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches, epoch by epoch, each in a new order; the last batch of an epoch may be short.

        The order of an epoch is `torch.randperm(n)` from `rng.torch("batches")`. If one batch holds all examples, they
        keep their order and nothing is drawn.
        """
        n = len(self)
        generator = rng.torch("batches")
        if self.held(n):
            yield from self._from_memory(size, generator)
        augmenting = rng.torch("augment")
        while True:
            order = self._order(n, size, generator)
            for start in range(0, n, size):
                images, labels = self._images(order[start : start + size])
                if self.augment is not None:
                    images = self.augment(images, augmenting)
                yield normalize(images, self.mean, self.std), labels

    def held(self, n: int, /) -> int:
        """The bytes of floats that `batches` keeps for n examples: in their own order and in that of an epoch.

        0 if it normalizes each batch on its own: if examples are augmented, or too many.
        """
        whole = n * self.examples.values * 4
        return 2 * whole if self.augment is None and whole <= _WHOLE else 0

    def beside(self, others: Sequence[Any], /) -> bool:
        """Whether `gather` can read the examples of this client and of `others` together.

        It cannot if they are augmented or shifted, which differs by client, or come from different datasets.
        """
        return all(
            type(each) is ClientDataset
            and each.augment is None
            and not each.features
            and each.indices is not None
            and each.examples is self.examples
            for each in (self, *others)
        )

    def gather(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized images float32 [k, C, H, W] and labels at `places`, int64 [k], positions in `examples`."""
        images, labels = self.examples.batch(places)
        return normalize(images, self.mean, self.std), labels

    @staticmethod
    def orders(
        holders: Sequence[ClientDataset], sizes: Sequence[int], rngs: Sequence[Rng], steps: Sequence[int]
    ) -> Tensor:
        """The positions of the examples of each client's first `steps` batches: int64 [steps, clients, size].

        -1 fills short batches, and the steps that a client does not have.
        """
        generator, orders = torch.Generator(), []
        for holder, size, rng, count in zip(holders, sizes, rngs, steps, strict=True):
            n, rows = len(holder), []
            generator.manual_seed(rng.seed("batches"))
            for _ in range(0, count, -(-n // size)):
                order = holder._order(n, size, generator)
                if n % size:
                    order = torch.nn.functional.pad(order, (0, -n % size), value=-1)
                rows.append(order)
            orders.append((rows[0] if len(rows) == 1 else torch.cat(rows))[: count * size])
        longest, largest = max(steps), max(sizes)
        if min(steps) == longest and min(sizes) == largest:
            return torch.stack(orders).view(-1, longest, largest).transpose(0, 1)
        at = torch.full((longest, len(orders), largest), -1)
        for k, (order, size, count) in enumerate(zip(orders, sizes, steps, strict=True)):
            at[:count, k, :size] = order.view(count, size)
        return at

    def _images(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The images uint8, with this client's shifts, and labels at the positions `at`."""
        positions = at if self.indices is None else self.indices[at]
        images, labels = self.examples.batch(positions)
        if not self.features:
            return images, labels
        features = {
            name: (values[at] if len(values) > 1 else values.expand(len(at))).to(images.device)
            for name, values in self.features.items()
        }
        return shifted(images, features, positions.to(images.device)), labels

    def _from_memory(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self)
        images, labels = self.stretch(0, n)
        while True:
            if size >= n:
                yield images, labels
                continue
            order = self._order(n, size, generator)
            at = order.to(images.device)
            shuffled, shuffled_labels = images.index_select(0, at), labels.index_select(0, at)
            for start in range(0, n, size):
                yield shuffled[start : start + size], shuffled_labels[start : start + size]

    @staticmethod
    def _order(n: int, size: int, generator: torch.Generator) -> Tensor:
        return torch.arange(n) if size >= n else torch.randperm(n, generator=generator)


@dataclass(frozen=True)
class ClientDatasets(ClientDataSource):
    """The data of each client, and of the server.

    The server has `@test`, `@validation` (the held-out examples), and `@train`, all clients' examples pooled. Test
    images are not shifted; held-out and training images have the shifts of their client.

    Args:
        dataset: its splits are tensors or files (`Examples.tensors`); `indices` point into the training split.
        indices, offsets: int64; client k holds the examples at `indices[offsets[k] : offsets[k + 1]]`.
        features: float32 [clients] by name, the shifts of each client's images; see `fedlens.data.shifts`.
        held_out: int64, the positions that are held out for validation, or None.
        held_out_offsets: int64 [clients + 1], if each client holds out its own examples: client k holds out
            `held_out[held_out_offsets[k] : held_out_offsets[k + 1]]`; None if they are held out of all examples.
        augment: applied to the clients' training images.
    """

    dataset: Dataset
    indices: Tensor
    offsets: NDArray[np.int64]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    held_out: Tensor | None = None
    held_out_offsets: NDArray[np.int64] | None = None
    augment: Augment | None = None

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def largest(self) -> int:
        """The number of examples of the largest client."""
        return int(np.diff(self.offsets).max())

    def client_indices(self, client: int) -> Tensor:
        """int64 [n_k]: the positions of this client's examples in the training split; a view."""
        return self.indices[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def client_held_out(self, client: int) -> Tensor | None:
        """int64 [m_k]: the positions that this client holds out; None if clients hold out none."""
        if self.held_out is None or self.held_out_offsets is None:
            return None
        return self.held_out[int(self.held_out_offsets[client]) : int(self.held_out_offsets[client + 1])]

    def held_out_sizes(self) -> NDArray[np.int64] | None:
        """int64 [clients]: how many examples each client holds out; None if clients hold out none."""
        return None if self.held_out_offsets is None else np.diff(self.held_out_offsets)

    def on(self, device: torch.device, /) -> ClientDatasets:
        """The same for training on `device`; the images are kept there if they fit in half of its free memory."""
        room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**62
        train = self.dataset.train.on(device, room)
        # `beside` compares examples by identity, so the two splits must stay one object.
        same = self.dataset.test is self.dataset.train
        test = train if same else self.dataset.test.on(device, room // 4)
        return replace(self, dataset=replace(self.dataset, train=train, test=test))

    def holder(self, client: ClientId, /) -> ClientDataset:
        """The data of this client. Raises `KeyError` for an unknown name."""
        train = self.dataset.train
        if not isinstance(client, str):
            features = {name: values[client : client + 1] for name, values in self.features.items()}
            held_out = self.client_held_out(client)
            validation = None if held_out is None else self._of(train, held_out, None, features)
            return self._of(train, self.client_indices(client), self.augment, features, validation)
        if client == "@train":
            return self._of(train, self.indices, self.augment, self._each(self.offsets))
        if client == "@validation" and self.held_out is not None:
            return self._of(train, self.held_out, None, self._each(self.held_out_offsets))
        if client == "@test":
            return self._of(self.dataset.test, None, None, {})
        raise KeyError(client)

    def _of(
        self,
        examples: Examples,
        indices: Tensor | None,
        augment: Augment | None,
        features: Mapping[str, Tensor],
        validation: ClientDataset | None = None,
    ) -> ClientDataset:
        mean, std = self.dataset.mean, self.dataset.std
        return ClientDataset(examples, indices, mean, std, augment, features, validation)

    def _each(self, offsets: NDArray[np.int64] | None) -> dict[str, Tensor]:
        """The shifts of each example, client by client."""
        if offsets is None:
            return {}
        counts = torch.from_numpy(np.diff(offsets))
        return {name: values.repeat_interleave(counts) for name, values in self.features.items()}

    def held(self) -> dict[str, int]:
        """The number of examples of each of the server's datasets, by name."""
        sizes = {"@test": len(self.dataset.test), "@train": len(self.indices)}
        if self.held_out is not None:
            sizes["@validation"] = len(self.held_out)
        return sizes
