"""The data of the parties of vertical learning: each holds a part of the same images, and one has the labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
        held: its part of the images for evaluation, by name: `@test`, and `@validation` if there are any. All parties
            have these.

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
    held: Mapping[str, PartyDataset] = field(default_factory=dict)

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
    """The data of each party, by its number, and the whole images for evaluation.

    Args:
        parties: of each party.
        whole: `@test` and perhaps `@validation`, whole images with their labels, if the parties hold windows of them.
    """

    parties: tuple[PartyDataset, ...]
    whole: Mapping[str, ClientDataset] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The number of examples of the largest party."""
        return max(map(len, self.parties))

    def data_of(self, client: ClientId, /) -> PartyDataset | ClientDataset:
        """The data of this party, or whole images such as `@test`. Raises `KeyError` for an unknown name."""
        return self.parties[client] if is_client(client) else self.whole[client]

    def on(self, device: torch.device, /) -> VerticalDatasets:
        """The same for training on `device`; images are kept there if they fit in half of its free memory."""
        room, parties = room_on(device) // len(self.parties), []
        for party in self.parties:
            moved = party.on(device, room)
            held = {
                name: replace(examples, examples=moved.examples)  # of the same split
                if examples.examples is party.examples
                else examples.on(device, room // 4)
                for name, examples in party.held.items()
            }
            parties.append(replace(moved, held=held))
        return replace(self, parties=tuple(parties))


def federate_parties(
    dataset: Dataset, seed: int, validation: float = 0.0, held_out_seed: int = 0, **settings: Any
) -> tuple[ClientDatasets, FeaturePartition]:
    """Partitions the features of `dataset` among parties; `settings` are those of `partition_features`.

    The share `validation` of the examples that all parties have is held out, by `held_out_seed`.

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
    at = partition.labels_at
    row_of = dict(zip(partition.keys[at], partition.rows[at].tolist(), strict=True))
    partition, held = partition.hold_out(validation, held_out_seed)
    whole = replace(
        _as_tensors(dataset), parties=tuple(party and _as_tensors(party) for party in dataset.parties)
    )
    offsets = np.concatenate([[0], np.cumsum(partition.sizes())])
    data = ClientDatasets(
        whole,
        torch.from_numpy(np.concatenate(partition.rows)),
        offsets,
        held_out=torch.tensor([row_of[name] for name in held]) if held else None,
    )
    return data, partition


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


def vertical_datasets(
    dataset: Dataset, partition: FeaturePartition, held_out: Tensor | None = None
) -> VerticalDatasets:
    """The data of each party of this partition. The splits of `dataset` are tensors or files.

    `held_out`, int64 [m], are the positions of the validation examples in the training split of the label party.
    """
    parties, count = [], len(partition)
    names = (dataset.of_parties or (dataset,) * count)[partition.labels_at].train.columns.get("id")
    held = [] if held_out is None else held_out.tolist()
    validation = [str(row if names is None else names[row]) for row in held]
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
        of_test = replace(party, examples=test, rows=rows, ids=tuple(map(str, tested)))
        parts = {"@test": of_test}
        if held_out is not None:
            own = {str(name): row for row, name in enumerate(view.train.columns.get("id", range(len(train))))}
            found = torch.tensor([own[name] for name in validation])
            parts["@validation"] = replace(party, rows=found, ids=tuple(validation))
        parties.append(replace(party, held=parts))
    if dataset.parties:
        return VerticalDatasets(tuple(parties))
    splits = {"@test": (dataset.test, None), "@validation": (dataset.train, held_out)}
    whole = {
        name: ClientDataset(examples, rows, dataset.mean, dataset.std)
        for name, (examples, rows) in splits.items()
        if name in parties[0].held
    }
    return VerticalDatasets(tuple(parties), whole)


def _seen(examples: Examples, window: Window | None, has_labels: bool) -> Examples:
    """What a party holds of these examples: its window, if they are in memory, and labels if it has them."""
    inputs = examples.inputs
    if window is not None and not examples.lazy:
        inputs = window.of(inputs).contiguous()
    labels = examples.targets if has_labels else torch.zeros(len(examples), 0, dtype=torch.uint8)
    return Examples(inputs, labels, names=examples.names)
