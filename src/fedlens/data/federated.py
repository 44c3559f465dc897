"""A dataset scattered over clients: the examples once, and for each client a view of who has what."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.core.errors import ConfigError, DataError
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples, refuse_features
from fedlens.data.decode_cache import fingerprint
from fedlens.data.images import ImageFiles
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table

Partitioner = Callable[[Table], Partition]
Scope = Literal["global", "client"]


@dataclass(frozen=True, eq=False)
class TensorExamples:
    """Inputs and targets as tensors, or as files from which they are made.

    Args:
        inputs: uint8 [n, C, H, W] or int64 [n, T].
        targets: int64 [n] or [n, T], uint8 [n, H, W], or `Boxes`.
        device: where to what is taken goes; None leaves it where it lies.
    """

    inputs: Any
    targets: Any
    device: torch.device | None = None

    @classmethod
    def of(cls, examples: Examples) -> TensorExamples:
        """The same memory as tensors; only read-only arrays, which PyTorch does not have, are copied."""
        return cls(_tensor(examples.inputs), _tensor(examples.targets))

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def values(self) -> int:
        """How many numbers one input is."""
        return prod(self.inputs.shape[1:])

    def take(self, index: Tensor) -> TensorExamples:
        """The examples at the positions `index`, int64 [k], in memory of their own."""
        return TensorExamples(self._there(_take(self.inputs, index)), self._there(_take(self.targets, index)))

    def stretch(self, start: int, stop: int) -> TensorExamples:
        """The examples from `start` to before `stop`: views, where they lie in memory."""
        inputs, targets = _stretch(self.inputs, start, stop), _stretch(self.targets, start, stop)
        return TensorExamples(self._there(inputs), self._there(targets))

    def on(self, device: torch.device, room: int) -> TensorExamples:
        """The same examples for work on a device: kept there, where they lie in memory and in so many bytes of room.

        Otherwise each batch goes there by itself.
        """
        parts = [part for part in (self.inputs, self.targets) if isinstance(part, Tensor)]
        if len(parts) == 2 and sum(part.nbytes for part in parts) <= room:
            return TensorExamples(self.inputs.to(device), self.targets.to(device), device)
        return TensorExamples(self.inputs, self.targets, device)

    def _there(self, taken: Any) -> Any:
        if self.device is None or not isinstance(taken, Tensor):
            return taken
        return taken.to(self.device, non_blocking=True)

    def feed(self, hashed: hashlib._Hash) -> None:
        """Feeds a hash with the bytes in memory; of what is in files, with their names and contents."""
        for part in (self.inputs, self.targets):
            if isinstance(part, ImageFiles):
                hashed.update(fingerprint(part).encode())
                continue
            for tensor in _tensors(part):
                hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
                hashed.update(tensor.contiguous().numpy().data)


@dataclass(frozen=True, eq=False)
class FederatedData:
    """What a federation trains and is measured on.

    Args:
        train: the whole training split; `indices` point into it.
        test: the test split.
        held: int64, the positions in `train` that are held out for validation, or None.
        held_offsets: int64 [clients + 1], where each client held out its own: client k holds out
            `held[held_offsets[k] : held_offsets[k + 1]]`; None where they were held out of all.
        indices, offsets: int64; client k holds `train` at `indices[offsets[k] : offsets[k + 1]]`.
        classes: the name of each class.
        mean, std: for `fedlens.data.transforms.normalize`.
        input_shape: (C, H, W), or (T,).
        features: float32 [clients] by name, how each client sees its images; see `fedlens.data.shifts`.
    """

    train: TensorExamples
    test: TensorExamples
    held: Tensor | None
    held_offsets: NDArray[np.int64] | None
    indices: Tensor
    offsets: NDArray[np.int64]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_shape: tuple[int, ...]
    features: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    def client_indices(self, client: int) -> Tensor:
        """int64 [n_k]: the positions in `train` that client number `client` holds; a view."""
        return self.indices[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def client_held(self, client: int) -> Tensor | None:
        """int64 [m_k]: the positions in `train` that this client holds out; None where no client does."""
        if self.held is None or self.held_offsets is None:
            return None
        return self.held[int(self.held_offsets[client]) : int(self.held_offsets[client + 1])]

    def held_sizes(self) -> NDArray[np.int64] | None:
        """int64 [clients]: how many examples each client holds out of its own; None where no client does."""
        return None if self.held_offsets is None else np.diff(self.held_offsets)

    def sizes(self) -> NDArray[np.int64]:
        """int64 [clients]: how many examples each client holds."""
        return np.diff(self.offsets)


def federate(
    dataset: Dataset,
    partitioner: Partitioner,
    validation: float = 0.0,
    seed: int = 0,
    scope: Scope = "global",
) -> tuple[FederatedData, Partition]:
    """Scatters the training split of `dataset`, and holds out the share `validation` of it.

    With `scope` "global" the share is held out first, of all examples, and `partitioner` gets the table of what
    is left; its partition is translated back: the indices always count in the published training split. With
    "client" the partition is drawn first, and every client holds out its share of its own. Which examples are
    held out is uniformly random and depends on `seed` and the numbers of examples alone.

    Raises `ConfigError` where `validation` is not in [0, 1), or leaves nothing to train on, or a partition of
    texts has features of images; `DataError` where the partition points outside the data it was given.

    >>> from fedlens.data.datasets.digits import digits
    >>> from fedlens.data.partition.iid import iid
    >>> from pathlib import Path
    >>> whole = digits(Path(), False, 0)
    >>> data, partition = federate(whole, lambda table: iid(table, 0, clients=20), validation=0.1)
    >>> data.clients, len(data.held), partition.dataset
    (20, 144, 'digits')
    """
    table = dataset.table()
    kept, held = hold_out(len(table), validation if scope == "global" else 0.0, seed)
    drawn = partitioner(table.take(kept) if len(held) else table)
    if drawn.indices.size and drawn.indices.max() >= len(kept):
        raise DataError(
            f"the partition points to example {drawn.indices.max()} of {len(kept)}", where=dataset.name
        )
    refuse_features(dataset, drawn)
    partition = replace(drawn, indices=kept[drawn.indices], dataset=dataset.name)
    held_offsets = None
    if scope == "client" and validation:
        partition, held, held_offsets = hold_out_each(partition, validation, seed)
    partition = partition.counted(table)
    data = FederatedData(
        train=TensorExamples.of(dataset.train),
        test=TensorExamples.of(dataset.test),
        held=torch.from_numpy(held) if len(held) else None,
        held_offsets=held_offsets,
        indices=torch.from_numpy(partition.indices.copy()),
        offsets=partition.offsets,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        input_shape=dataset.input_shape,
        features={name: torch.from_numpy(v).float() for name, v in partition.features.items()},
    )
    return data, partition


def hold_out(examples: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(kept, held out): positions in ascending order. At least one is held out where `share` is not 0.

    >>> [len(part) for part in hold_out(1000, 0.02, seed=0)]
    [980, 20]
    """
    if not 0 <= share < 1:
        raise ConfigError(
            f"the validation share is {share}, and has to be in [0, 1)", where="data.validation"
        )
    count = max(1, round(share * examples)) if share else 0
    if count >= examples and count:
        raise ConfigError(
            f"a validation share of {share} leaves no example to train on", where="data.validation"
        )
    (stream,) = streams(seed, 1)
    order = stream.permutation(examples).astype(np.int64) if count else np.arange(examples, dtype=np.int64)
    return np.sort(order[count:]), np.sort(order[:count])


def hold_out_each(
    partition: Partition, share: float, seed: int
) -> tuple[Partition, NDArray[np.int64], NDArray[np.int64]]:
    """(the partition without them, held out, offsets): each client holds out `share` of its own examples.

    Of n_k examples it is share n_k, rounded up or down at random so that the mean is exact; a client keeps at
    least one to train on.

    Raises `ConfigError` where the share is not in [0, 1), or so small that no client holds out any.

    >>> p, held, offsets = hold_out_each(Partition.of_owners([0] * 10 + [1] * 5, 2), 0.2, seed=0)
    >>> p.sizes().tolist(), len(held), offsets.tolist()
    ([8, 4], 3, [0, 2, 3])
    """
    hold_out(len(partition.indices), share, seed)  # its checks
    rounding, choosing = streams(seed, 2)
    sizes = partition.sizes()
    counts = np.floor(share * sizes + rounding.random_sample(len(sizes)) * (1 - 1e-9)).astype(np.int64)
    counts = np.clip(counts, 0, np.maximum(sizes - 1, 0))
    if not counts.any():
        raise ConfigError(
            f"a validation share of {share} holds out no example of any client", where="data.validation"
        )
    owners = partition.owners()
    # A random order within each client; its first examples are held out.
    order = np.lexsort((choosing.random_sample(len(owners)), owners))
    rank = np.arange(len(owners)) - partition.offsets[:-1][owners]
    out = np.zeros(len(owners), bool)
    out[order[rank < counts[owners]]] = True
    offsets = np.concatenate([[0], np.cumsum(sizes - counts)])
    rest = replace(partition, indices=partition.indices[~out], offsets=offsets)
    return rest, partition.indices[out].copy(), np.concatenate([[0], np.cumsum(counts)])


def _tensor(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _take(part: Any, index: Tensor) -> Any:
    if isinstance(part, Tensor):
        return part.index_select(0, index.to(part.device))
    return _tensor(part.take(index.numpy()))


def _stretch(part: Any, start: int, stop: int) -> Any:
    return part[start:stop] if isinstance(part, Tensor) else _take(part, torch.arange(start, stop))


def _tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Boxes):
        return [torch.from_numpy(a) for a in (part.boxes, part.labels, part.offsets)]
    return [part]
