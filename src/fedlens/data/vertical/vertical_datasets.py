"""The data of the parties of vertical learning: each holds a part of the same images, and one has the labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.dataset_info import PartyFacts, Window
from fedlens.core.protocol import ClientDataSource, ClientId
from fedlens.core.types import is_client
from fedlens.data.client_datasets import ClientDataset, ClientDatasets, room_on
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.lazy_images import LazyImages
from fedlens.data.normalize import normalize
from fedlens.data.vertical.feature_partition import AnyPartition, FeaturePartition, partition_features

_PICTURE = 400  # pixels of a side, from which only some lines of a picture are kept


@dataclass(frozen=True)
class PartyDataset:
    """The examples of one party, or its part of the test images.

    Args:
        examples: what `rows` point into. At a party without labels it has none.
        rows: int64 [n], the positions of its examples, in the party's own order.
        ids: the id of each example, in the same order.
        mean, std: for `normalize`.
        has_labels: whether the party has the labels.
        classes: the number of classes.
        window: what the party sees of each of the `examples`, if they are whole images.
        test: its part of the test images, which all parties have in the same order.

    >>> images = torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4)
    >>> examples, rows = Examples(images, torch.tensor([5, 6])), torch.tensor([1, 0])
    >>> party = PartyDataset(examples, rows, ("b", "a"), (0.0,), (1 / 255,), True, 7, Window(0, 0, 1, 2))
    >>> party.inputs(torch.tensor([0])).tolist(), party.labels(torch.tensor([0, 1])).tolist(), party.input_shape
    ([[[[16.0, 17.0]]]], [6, 5], (1, 1, 2))
    """

    examples: Examples
    rows: Tensor
    ids: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    has_labels: bool
    classes: int
    window: Window | None = None
    test: PartyDataset | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, h, w): the shape of one input."""
        whole = tuple(self.examples.inputs.shape[1:])
        return whole if self.window is None else (*whole[:-2], self.window.height, self.window.width)

    def inputs(self, positions: Tensor) -> Tensor:
        """float32 [k, C, h, w], normalized: this party's part of its examples at `positions`, int64 [k]."""
        images, _ = self.examples.batch(self.rows[positions])
        return normalize(images if self.window is None else self.window.of(images), self.mean, self.std)

    def labels(self, positions: Tensor) -> Tensor:
        """int64 [k]: the classes of its examples at `positions`, int64 [k]. Raises `DataError` where it has none."""
        if not self.has_labels:
            raise DataError("this party has no labels: only the party data.parties.labels_at has them")
        labels: Tensor = self.examples.targets_at(self.rows[positions])
        return labels

    def on(self, device: torch.device, room: int) -> PartyDataset:
        """The same for training on `device`; its images are kept there if they take at most `room` bytes."""
        return replace(self, examples=self.examples.on(device, room))


@dataclass(frozen=True)
class VerticalDatasets(ClientDataSource):
    """The data of each party, by its number, and the whole test images.

    Args:
        parties: of each party.
        whole: the whole test images with their labels, if the parties hold windows of them.
    """

    parties: tuple[PartyDataset, ...]
    whole: ClientDataset | None = None

    @property
    def largest(self) -> int:
        """The number of examples of the largest party."""
        return max(map(len, self.parties))

    def data_of(self, client: ClientId, /) -> PartyDataset | ClientDataset:
        """The data of this party, or of `@test`, the whole test images. Raises `KeyError` for an unknown name."""
        if is_client(client):
            return self.parties[client]
        if client == "@test" and self.whole is not None:
            return self.whole
        raise KeyError(client)

    def on(self, device: torch.device, /) -> VerticalDatasets:
        """The same for training on `device`; images are kept there if they fit in half of its free memory."""
        room, parties = room_on(device) // len(self.parties), []
        for party in self.parties:
            test = None if party.test is None else party.test.on(device, room // 4)
            parties.append(replace(party.on(device, room), test=test))
        return replace(self, parties=tuple(parties))


def federate_parties(dataset: Dataset, seed: int, **settings: Any) -> tuple[ClientDatasets, FeaturePartition]:
    """Partitions the features of `dataset` among parties; `settings` are those of `partition_features`.

    The datasets that are returned have each party's examples whole and by position; `vertical_datasets` cuts them.
    Data of several parties are partitioned already, and have no settings.

    Raises `ConfigError` if the examples are no images of one class each, or do not fit the settings.
    """
    drawn = isinstance(dataset.train.inputs, LazyImages) and dataset.train.inputs.changing
    if dataset.kind != "classification" or drawn:
        kind = "images that are drawn anew" if drawn else dataset.kind
        raise ConfigError(
            f"parties hold parts of images of one class each, and '{dataset.name}' is for {kind}",
            where="data.parties",
            hint="choose a dataset for classification, such as 'fashion-mnist', or set data.partition in its place",
        )
    if dataset.parties:
        partition = _of_files(dataset)
    else:
        shape, name = dataset.input_shape, dataset.name
        partition = partition_features(len(dataset.train), shape, seed=seed, dataset=name, **settings)
    whole = replace(
        _as_tensors(dataset), parties=tuple(party and _as_tensors(party) for party in dataset.parties)
    )
    offsets = np.concatenate([[0], np.cumsum(partition.sizes())])
    return ClientDatasets(whole, torch.from_numpy(np.concatenate(partition.rows)), offsets), partition


def _of_files(dataset: Dataset) -> FeaturePartition:
    """The partition of data of several parties, named after their tables where these have different names."""
    views = dataset.of_parties
    stems = tuple(Path(view.source).stem for view in views)
    names = tuple(tuple(view.train.columns["id"].tolist()) for view in views)
    return FeaturePartition(
        stems if len(set(stems)) == len(stems) else tuple(map(str, range(len(views)))),
        tuple(np.arange(len(view.train)) for view in views),
        tuple((c, h, w) for c, h, w in (view.input_shape for view in views)),
        None,
        dataset.parties.index(None),
        {"name": "parties", "files": [view.source for view in views]},
        dataset.name,
        names,
    )


def _as_tensors(dataset: Dataset) -> Dataset:
    """The dataset for training, with the columns of its examples."""
    train, test = (replace(split.tensors(), columns=split.columns) for split in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test)


def party_facts(partition: AnyPartition, align: Literal["psi", "ids"]) -> PartyFacts | None:
    """What parties know of each other; None for clients with whole examples."""
    if not isinstance(partition, FeaturePartition):
        return None
    return PartyFacts(partition.ids, partition.shapes, partition.windows, partition.labels_at, align)


def with_pictures(partition: FeaturePartition, dataset: Dataset) -> FeaturePartition:
    """The partition with pictures of its first test image, by id: the whole image, or that of each party."""
    pictures = []
    for view in dataset.of_parties or (dataset,):
        ids = list(view.test.columns.get("id", [0]))
        images, _ = view.test.batch(torch.tensor([ids.index(min(ids))]))
        image = images[0] if images.shape[1] in (1, 3) else images[0, :1]
        step = 1 + max(image.shape[1:]) // _PICTURE
        pictures.append(image[:, ::step, ::step].numpy())
    return replace(partition, pictures=tuple(pictures))


def vertical_datasets(dataset: Dataset, partition: FeaturePartition) -> VerticalDatasets:
    """The data of each party of this partition. The splits of `dataset` are tensors or files."""
    parties, count = [], len(partition)
    for k, (view, window) in enumerate(
        zip(dataset.of_parties or (dataset,) * count, partition.windows or (None,) * count, strict=True)
    ):
        has_labels = k == partition.labels_at
        train, test = (_seen(split, window, has_labels) for split in (view.train, view.test))
        tested = view.test.columns.get("id", [f"test-{row}" for row in range(len(test))])
        party = PartyDataset(
            train,
            torch.from_numpy(partition.rows[k].copy()),
            partition.keys[k],
            view.mean,
            view.std,
            has_labels,
            len(dataset.classes),
            window if train.lazy else None,
        )
        rows = torch.arange(len(test))
        parties.append(
            replace(party, test=replace(party, examples=test, rows=rows, ids=tuple(map(str, tested))))
        )
    whole = ClientDataset(dataset.test, None, dataset.mean, dataset.std)
    return VerticalDatasets(tuple(parties), None if dataset.parties else whole)


def _seen(examples: Examples, window: Window | None, has_labels: bool) -> Examples:
    """What a party holds of these examples: its window, if they are in memory, and labels if it has them."""
    inputs = examples.inputs
    if window is not None and not examples.lazy:
        inputs = window.of(inputs).contiguous()
    labels = examples.targets if has_labels else torch.zeros(len(examples), 0, dtype=torch.uint8)
    return Examples(inputs, labels, names=examples.names)
