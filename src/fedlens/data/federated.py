"""A dataset scattered over clients: the images once, and for each client a view of who has what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.core.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition

Partitioner = Callable[[NDArray[np.int64]], Partition]


@dataclass(frozen=True, eq=False)
class TensorExamples:
    """Images and labels as tensors.

    Args:
        inputs: uint8 [n, C, H, W].
        targets: int64 [n].
    """

    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, examples: Examples) -> TensorExamples:
        """The same memory as tensors; only read-only arrays, which PyTorch does not have, are copied."""
        return cls(_tensor(examples.inputs), _tensor(examples.targets))

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, index: Tensor) -> TensorExamples:
        """A copy of the examples at the positions `index`, int64 [k]."""
        return TensorExamples(self.inputs.index_select(0, index), self.targets.index_select(0, index))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """What a federation trains and is measured on.

    Args:
        train: the whole training split; `indices` point into it.
        test: the test split.
        validation: the held-out part of the training split, or None.
        indices, offsets: int64; client k holds `train` at `indices[offsets[k] : offsets[k + 1]]`.
        classes: the name of each class.
        mean, std: for `fedlens.data.transforms.normalize`.
        input_shape: (C, H, W).
    """

    train: TensorExamples
    test: TensorExamples
    validation: TensorExamples | None
    indices: Tensor
    offsets: NDArray[np.int64]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    input_shape: tuple[int, int, int]

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    def client_indices(self, client: int) -> Tensor:
        """int64 [n_k]: the positions in `train` that client number `client` holds; a view."""
        return self.indices[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def sizes(self) -> NDArray[np.int64]:
        """int64 [clients]: how many examples each client holds."""
        return np.diff(self.offsets)


def federate(
    dataset: Dataset, partitioner: Partitioner, validation: float = 0.0, seed: int = 0
) -> tuple[FederatedData, Partition]:
    """Scatters the training split of `dataset`, after holding out the share `validation` of it.

    `partitioner` gets the labels of what is not held out, and its partition is translated back: the indices
    always count in the published training split, and those held out do not occur. Which examples are held out
    is uniformly random and depends on `seed` and the number of examples alone.

    Raises `ConfigError` where `validation` is not in [0, 1), or leaves nothing to train on; `DataError` where
    the partition points outside the data it was given.

    >>> from fedlens.data.datasets.digits import digits
    >>> from fedlens.data.partition.iid import iid
    >>> from pathlib import Path
    >>> whole = digits(Path(), False, 0)
    >>> data, partition = federate(whole, lambda labels: iid(labels, 0, clients=20), validation=0.1)
    >>> data.clients, len(data.validation), partition.dataset
    (20, 144, 'digits')
    """
    kept, held = hold_out(len(dataset.train), validation, seed)
    drawn = partitioner(dataset.train.targets[kept])
    if drawn.indices.size and drawn.indices.max() >= len(kept):
        raise DataError(
            f"the partition points to example {drawn.indices.max()} of {len(kept)}", where=dataset.name
        )
    partition = replace(drawn, indices=kept[drawn.indices], dataset=dataset.name)
    train = TensorExamples.of(dataset.train)
    data = FederatedData(
        train=train,
        test=TensorExamples.of(dataset.test),
        validation=train.take(torch.from_numpy(held)) if len(held) else None,
        indices=torch.from_numpy(partition.indices.copy()),
        offsets=partition.offsets,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        input_shape=dataset.input_shape,
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


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())
