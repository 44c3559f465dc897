"""Distributes a dataset over clients, and holds out examples for validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.dataset import Dataset, refuse_features
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table, unit_numbers

Partitioner = Callable[[Table], Partition]
Scope = Literal["global", "client"]


def federate(
    dataset: Dataset,
    partitioner: Partitioner,
    validation: float = 0.0,
    seed: int = 0,
    scope: Scope = "global",
    unit: str | None = None,
) -> tuple[ClientDatasets, Partition]:
    """Distributes the training split of `dataset`, and holds out the share `validation` of it.

    With `scope` "global" the share is held out of all examples first, and `partitioner` gets the table of the others;
    the indices of its partition are mapped back to the published training split. With "client" the partition is drawn
    first, and every client holds out its share. The held-out examples are uniformly random and depend only on `seed`
    and the numbers of examples. `unit` is the column whose values `ClientDataset.units` tells.

    Raises `ConfigError` if `validation` is not in [0, 1), or leaves nothing to train on, or a partition of texts has
    features of images; `DataError` if the partition has indices outside the data.

    >>> from fedlens.data.datasets.digits import digits
    >>> from fedlens.data.partition.iid import iid
    >>> from pathlib import Path
    >>> whole = digits(Path(), False, 0)
    >>> data, partition = federate(whole, lambda table: iid(table, 0, clients=20), validation=0.1)
    >>> data.clients, len(data.held_out), partition.dataset
    (20, 144, 'digits')
    """
    table = dataset.table()
    partition, held, held_offsets = divided(dataset, table, partitioner, validation, seed, scope)
    data = ClientDatasets(
        replace(
            dataset,
            train=replace(dataset.train.tensors(), columns=unit_numbers(dataset.train.columns, unit)),
            test=dataset.test.tensors(),
            notes=(*dataset.notes, *_void_masks(dataset, table)),
        ),
        indices=torch.from_numpy(partition.indices.copy()),
        offsets=partition.offsets,
        features={name: torch.from_numpy(v).float() for name, v in partition.features.items()},
        held_out=torch.from_numpy(held) if len(held) else None,
        held_out_offsets=held_offsets,
    )
    return data, partition


def divided(
    dataset: Dataset, table: Table, partitioner: Partitioner, validation: float, seed: int, scope: Scope
) -> tuple[Partition, NDArray[np.int64], NDArray[np.int64] | None]:
    """(partition of the others with its census, held out, offsets of each client in them), as `federate`.

    Args:
        table: of the training split, whose images are not read.
    """
    kept, held = hold_out(len(table), validation if scope == "global" else 0.0, seed)
    drawn = partitioner(table.take(kept) if len(held) else table)
    if drawn.indices.size and drawn.indices.max() >= len(kept):
        raise DataError(
            f"the partition points to example {drawn.indices.max()} of {len(kept)}", where=dataset.name
        )
    refuse_features(dataset, drawn)
    partition, held_offsets = replace(drawn, indices=kept[drawn.indices], dataset=dataset.name), None
    if scope == "client" and validation:
        partition, held, held_offsets = hold_out_each(partition, validation, seed)
    return partition.counted(table), held, held_offsets


def _void_masks(dataset: Dataset, table: Table) -> list[str]:
    """A sentence on training masks without a class, if any."""
    void = int((np.diff(table.offsets) == 0).sum()) if dataset.kind == "segmentation" else 0
    what = f"{void} of {len(table)} training masks have no class in any pixel: nothing is learned from them"
    return [what] if void else []


def hold_out(examples: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(kept, held out): positions in ascending order. At least one is held out if `share` is not 0.

    >>> [len(part) for part in hold_out(1000, 0.02, seed=0)]
    [980, 20]
    """
    if not 0 <= share < 1:
        raise ConfigError(f"the validation share is {share}, but must be in [0, 1)", where="data.validation")
    count = max(1, round(share * examples)) if share else 0
    if count >= examples and count:
        raise ConfigError(
            f"a validation share of {share} leaves no training example", where="data.validation"
        )
    (stream,) = streams(seed, 1)
    order = stream.permutation(examples).astype(np.int64) if count else np.arange(examples, dtype=np.int64)
    return np.sort(order[count:]), np.sort(order[:count])


def hold_out_each(
    partition: Partition, share: float, seed: int
) -> tuple[Partition, NDArray[np.int64], NDArray[np.int64]]:
    """(partition of the others, held out, offsets): each client holds out `share` of its examples.

    Of n_k examples it is share n_k, rounded up or down at random so that the mean is exact; a client keeps at least
    one training example.

    Raises `ConfigError` if the share is not in [0, 1), or so small that no client holds out any.

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
            f"a validation share of {share} is too small: no client has a held-out example",
            where="data.validation",
        )
    owners = partition.owners()
    # The order is random within each client, whose first examples are held out.
    order = np.lexsort((choosing.random_sample(len(owners)), owners))
    rank = np.arange(len(owners)) - partition.offsets[:-1][owners]
    out = np.zeros(len(owners), bool)
    out[order[rank < counts[owners]]] = True
    offsets = np.concatenate([[0], np.cumsum(sizes - counts)])
    rest = replace(partition, indices=partition.indices[~out], offsets=offsets)
    return rest, partition.indices[out].copy(), np.concatenate([[0], np.cumsum(counts)])
