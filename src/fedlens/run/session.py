"""A session: start-up work that the runs of one process share."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles
from fedlens.data.lazy_images import LazyImages
from fedlens.data.loading import loaded
from fedlens.data.vertical.feature_partition import AnyPartition
from fedlens.files.read_files import Stamp, recorded_files, stamp_of, unchanged
from fedlens.run.environment import machine
from fedlens.settings.resolve import Resolved

MEMORY = 2 * 2**30
Federated = tuple[ClientDatasets, AnyPartition]


@dataclass
class SharedDataset:
    """A dataset that was read, and what was computed from it.

    Attributes:
        dataset: as its reader returned it.
        chosen: the reader and its settings; kept, so that their identities are not given to other objects.
        files: those it was read from, with their times and sizes.
        digest: of its images and labels, once a run has needed it.
    """

    dataset: Dataset
    chosen: Resolved
    files: dict[str, Stamp]
    digest: str | None = None
    _loaded: tuple[int, Dataset] | None = None
    _partitions: OrderedDict[Hashable, tuple[Federated, dict[str, Stamp]]] = field(
        default_factory=OrderedDict
    )

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays, its cache of decoded images, and its partitions."""
        dataset = self.dataset if self._loaded is None else self._loaded[1]
        arrays = sum(_nbytes(split) for split in dataset.splits)
        return arrays + sum(_partition_nbytes(federated) for federated, _ in self._partitions.values())

    def loaded(self, cache: int, say: Callable[[str], None]) -> Dataset:
        """The dataset with its image files decoded into at most `cache` bytes. Raises what `loaded` raises."""
        if self._loaded is None or self._loaded[0] != cache:
            self._partitions.clear()
            self.digest = None
            stamps = _stamps(self.dataset)  # of all: what an earlier check knows of a file is not read again
            with recorded_files() as files:
                dataset = loaded(self.dataset, cache, say)
            self.files |= {**stamps, **files}
            self._loaded = cache, dataset
        return self._loaded[1]

    def federated(self, key: Hashable, make: Callable[[], Federated]) -> Federated:
        """The distribution over clients with these settings, made by `make` at the first time."""
        federated, files = self._partitions.pop(key, (None, {}))
        if federated is None or not unchanged(files):
            with recorded_files() as files:
                federated = make()
        self._partitions[key] = federated, files  # the last is the one that was used last
        return federated

    def drop_partition(self) -> bool:
        """Drops the partition that was not used for longest, unless it is the only one. Returns whether it did."""
        if len(self._partitions) < 2:
            return False
        self._partitions.popitem(last=False)
        return True


class Session:
    """Shares start-up work between the runs of one process.

    A dataset is read, decoded and hashed once, a partition is drawn once, and the environment is asked for once. Runs
    give the same numbers and write the same files as without a session. A dataset is read again once a file that
    it was read from has another size or time, or a folder another entry; a dataset that a function of your own makes is
    shared between runs with the same function, settings and data seed, so the function must depend on nothing else but
    files. Of the source's revision in environment.json, all runs of a session have that of the first one.

    Args:
        memory: in bytes. Beyond it the datasets that were not used for longest are dropped, with their partitions. The
            dataset and the partition of the latest run stay.

    Raises `ConfigError` if `memory` is negative.

    >>> import tempfile
    >>> from fedlens.settings.config import read_config
    >>> session = Session()
    >>> len(session), session.memory == 2 * 2**30
    (0, True)
    """

    def __init__(self, memory: int = MEMORY) -> None:
        if memory < 0:
            raise ConfigError(
                f"the memory of a session is {memory} bytes (must be at least 0)", where="memory"
            )
        self.memory = memory
        self._datasets: OrderedDict[Hashable, SharedDataset] = OrderedDict()
        self._machines: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of datasets in memory."""
        return len(self._datasets)

    @property
    def nbytes(self) -> int:
        """The bytes of all datasets and partitions in memory."""
        return sum(shared.nbytes for shared in self._datasets.values())

    def dataset(
        self,
        chosen: Resolved,
        root: Path,
        download: bool,
        seed: int,
    ) -> SharedDataset:
        """The dataset of these settings below `root`. Raises what the reader raises."""
        factory = (*chosen.identity, str(root.resolve()), os.getcwd())
        # A function of the user's own may take the seed without saying so.
        own = chosen.by_keyword is not None and "seed" in chosen.by_keyword
        keys: list[Hashable] = [(*factory, seed)] if own else [factory, (*factory, seed)]
        with self._lock:
            for key in keys:
                shared = self._datasets.get(key)
                if shared is not None and unchanged(shared.files):
                    self._datasets.move_to_end(key)
                    return shared
                self._datasets.pop(key, None)
            with recorded_files() as files:
                dataset = chosen(root, download, seed)
            shared = SharedDataset(dataset, chosen, files)
            self._datasets[keys[-1] if dataset.seeded else keys[0]] = shared
            return shared

    def federated(self, shared: SharedDataset, key: Hashable, make: Callable[[], Federated]) -> Federated:
        """`shared.federated`; then drops what was not used for longest, beyond the memory of the session."""
        with self._lock:
            federated = shared.federated(key, make)
            for dataset in list(self._datasets):
                if self.nbytes <= self.memory:
                    break
                if self._datasets[dataset] is not shared:
                    del self._datasets[dataset]
            while self.nbytes > self.memory and shared.drop_partition():
                pass
            return federated

    def machine(self) -> dict[str, Any]:
        """What environment.json says of this machine and of the source in the current directory."""
        here = os.getcwd()
        if here not in self._machines:
            self._machines[here] = machine()
        return dict(self._machines[here])


def _stamps(dataset: Dataset) -> dict[str, Stamp]:
    """The stamps of the image files of a dataset that is not decoded yet."""
    parts = [part for split in dataset.splits for part in (split.inputs, split.targets)]
    paths = [str(part.path(at)) for part in parts if isinstance(part, ImageFiles) for at in range(len(part))]
    return {path: stamp for path in paths if (stamp := stamp_of(path)) is not None}


def _nbytes(split: Examples) -> int:
    total = 0
    for part in (split.inputs, split.targets):
        total += part.held_nbytes if isinstance(part, LazyImages) else int(part.nbytes)
    return total


def _partition_nbytes(federated: Federated) -> int:
    client_data, _ = federated
    indices, held = client_data.indices, client_data.held_out
    tensors = [indices, *client_data.features.values(), *([] if held is None else [held])]
    # The partition has its indices once more.
    return sum(tensor.nbytes for tensor in tensors) + indices.nbytes + client_data.offsets.nbytes
