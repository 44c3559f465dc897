"""The features that the frozen part of a model computes from images, kept so that each image goes through it once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.base.frozen import FrozenSplit
from fedlens.core.device_copies import uploaded
from fedlens.core.modules import module_in
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import random_state_kept
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.dataset import Examples
from fedlens.data.normalize import normalize
from fedlens.data.partition.feature import NEUTRAL
from fedlens.data.shifts import shifted

_CHUNK = 32  # images that go through the frozen part at once ...
_VALUES = 2**22  # ... and at most so many values
_SHARED = 2**13  # bytes of an array from which on processes share its memory


@dataclass(frozen=True, eq=False)
class FeatureStore:
    """Room for the features of the first images in the order of a split. Processes that get it share its memory.

    All of them write the same values into a row and set its flag afterwards, so they need no lock.

    Attributes:
        filled: uint8 [at least the number of rows], 1 where a row is stored.
        rows: float32 [rows, values].
    """

    filled: NDArray[np.uint8]
    rows: NDArray[np.float32]

    @classmethod
    def of(cls, rows: int, values: int) -> FeatureStore:
        """An empty store. It takes no memory until it is written to."""
        return cls(np.zeros(max(_SHARED, rows), np.uint8), np.zeros((rows, values), np.float32))


@dataclass(frozen=True, eq=False)
class Layout:
    """In which order and in which groups the images of a split go through the frozen part.

    Attributes:
        order: int64 [m], positions in the split; images of one client are neighbours.
        row: int64 [n], where each image is in `order`; m and more for images that are nowhere in it.
        chunk: int64 [m], which chunk each place of `order` belongs to.
        starts: int64 [chunks + 1], where each chunk starts in `order`.
    """

    order: Tensor
    row: Tensor
    chunk: Tensor
    starts: Tensor

    @classmethod
    def of(cls, n: int, parts: list[Tensor], size: int) -> Layout:
        """The layout of `parts`, the positions of each client, in chunks of at most `size`.

        >>> layout = Layout.of(4, [torch.tensor([3, 0, 2])], size=2)
        >>> layout.row.tolist(), layout.chunk.tolist(), layout.starts.tolist()
        ([1, 3, 2, 0], [0, 0, 1], [0, 2, 3])
        """
        lengths = [
            length for part in parts for length in [size] * (len(part) // size) + [len(part) % size] if length
        ]
        order = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
        row = torch.full((n,), len(order))
        row[order] = torch.arange(len(order))
        counts = torch.tensor(lengths, dtype=torch.int64)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        return cls(order, row, torch.arange(len(counts)).repeat_interleave(counts), starts)


@dataclass(frozen=True, eq=False)
class Features(Examples):
    """The examples of one split, read as features float32 [k, ...] in place of images.

    An image goes through the frozen part with the others of its chunk, the first time that one of them is read. So the
    last bits of its features depend neither on the batch that asks for it nor on the worker. Images that the store has
    no room for are computed each time, with those of the same batch. Features are computed in float32, on the device
    of the worker, and kept in CPU memory.

    Args:
        model: the model, whose frozen part is used.
        mean, std: for `normalize`.
        shape: the shape of one image's features.
        layout: the chunks.
        store: where features are kept.
        shifts: float32 [n] by name: the shifts of each image; see `fedlens.data.shifts`.
    """

    model: ModelSpec = field(kw_only=True)
    mean: tuple[float, ...] = field(kw_only=True)
    std: tuple[float, ...] = field(kw_only=True)
    shape: tuple[int, ...] = field(kw_only=True)
    layout: Layout = field(kw_only=True)
    store: FeatureStore = field(kw_only=True)
    shifts: Mapping[str, Tensor] = field(kw_only=True, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_scratch", {})  # the module of this process
        object.__setattr__(self, "_lock", threading.Lock())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_scratch", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Features.__post_init__(self)

    @property
    def lazy(self) -> bool:
        """No: features are not read ahead in a thread, which would share the random state with the training."""
        return False

    @property
    def values(self) -> int:
        """The number of values of one image's features."""
        return prod(self.shape)

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Any, Any]:
        """(features float32 [k, ...], targets) at the positions `index`, int64 [k]; nothing is drawn."""
        return uploaded(self._features(index), self.device or torch.device("cpu")), self.targets_at(index)

    def stretch(self, start: int, stop: int) -> tuple[Any, Any]:
        """(features, targets) from `start` to before `stop`."""
        return self.batch(torch.arange(start, min(stop, len(self))))

    def on(self, device: torch.device, room: int) -> Features:
        """The same for training on `device`: batches are moved there when they are read."""
        return replace(self, device=device)

    def _features(self, index: Tensor) -> Tensor:
        index = index.cpu()
        rows, room = self.layout.row[index], len(self.store.rows)
        here = rows < room
        filled = torch.from_numpy(self.store.filled)
        missing = rows[here][filled[rows[here]] == 0]
        for chunk in torch.unique(self.layout.chunk[missing]).tolist():
            self._fill(*self.layout.starts[chunk : chunk + 2].tolist())
        kept = torch.from_numpy(self.store.rows)
        if bool(here.all()):
            return kept.index_select(0, rows).view(-1, *self.shape)
        found = torch.empty(len(index), self.values)
        found[here] = kept[rows[here]]
        found[~here] = self._computed(index[~here])
        return found.view(-1, *self.shape)

    def _fill(self, start: int, stop: int) -> None:
        """Stores the features of a chunk, as far as there is room."""
        features = self._computed(self.layout.order[start:stop])
        stop = min(stop, len(self.store.rows))
        self.store.rows[start:stop] = features[: stop - start].numpy()
        self.store.filled[start:stop] = 1

    def _computed(self, positions: Tensor) -> Tensor:
        """Features float32 [k, values] of the images at these positions, in CPU memory."""
        images, _ = super().batch(positions)
        by = {name: values[positions] for name, values in self.shifts.items()}
        if by:
            images = shifted(images, by, positions)
        scratch, device = vars(self)["_scratch"], images.device
        # Not in inference mode, whose tensors no later step could train from.
        with vars(self)["_lock"], random_state_kept(device), torch.inference_mode(False):
            module = module_in(self.model, scratch, device).module.eval()
            split = FrozenSplit.of(module)
            assert split is not None
            size = max(1, min(_CHUNK, _VALUES // super().values))
            parts = [split.features(normalize(part, self.mean, self.std)) for part in images.split(size)]
        return torch.cat(parts).flatten(1).cpu()


def with_features(
    data: ClientDatasets, model: ModelSpec, shape: tuple[int, ...], nbytes: int
) -> ClientDatasets:
    """The same data, read as the features that the frozen part of the model computes from the images.

    Args:
        data: images that are not augmented.
        model: the model; its modules take features in place of images (`fedlens.base.frozen.FrozenSplit`).
        shape: the shape of one image's features.
        nbytes: the most that the features of both splits may take.
    """
    dataset = data.dataset
    size = max(1, min(_CHUNK, _VALUES // dataset.train.values))
    cuts = torch.tensor(data.offsets[1:-1])
    parts = list(data.indices.tensor_split(cuts))
    if data.held_out is not None:
        parts += (
            [data.held_out]
            if data.held_out_offsets is None
            else list(data.held_out.tensor_split(torch.tensor(data.held_out_offsets[1:-1])))
        )
    layouts = {"train": Layout.of(len(dataset.train), parts, size)}
    layouts["test"] = Layout.of(len(dataset.test), [torch.arange(len(dataset.test))], size)
    total = sum(len(layout.order) for layout in layouts.values())
    rows = min(total, nbytes // (4 * prod(shape)))

    def split_of(name: str, examples: Examples, shifts: Mapping[str, Tensor]) -> Features:
        layout = layouts[name]
        store = FeatureStore.of(rows * len(layout.order) // total, prod(shape))
        about: dict[str, Any] = {"mean": dataset.mean, "std": dataset.std, "shape": shape, "shifts": shifts}
        inputs, targets = examples.inputs, examples.targets
        return Features(inputs, targets, model=model, layout=layout, store=store, **about)

    train = split_of("train", dataset.train, _shifts(data))
    test = train if dataset.test is dataset.train else split_of("test", dataset.test, {})
    return replace(data, dataset=replace(dataset, train=train, test=test), features={})


def _shifts(data: ClientDatasets) -> dict[str, Tensor]:
    """The shifts of each image of the training split, from those of its client; an image has one client at most.

    Images that are held out of all examples have no client, and are not shifted.
    """
    found: dict[str, Tensor] = {}
    for name, values in data.features.items():
        each = torch.full((len(data.dataset.train),), NEUTRAL[name])
        each[data.indices] = values.repeat_interleave(torch.tensor(np.diff(data.offsets)))
        if data.held_out is not None and data.held_out_offsets is not None:
            counts = torch.tensor(np.diff(data.held_out_offsets))
            each[data.held_out] = values.repeat_interleave(counts)
        found[name] = each
    return found
