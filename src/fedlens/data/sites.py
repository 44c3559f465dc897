"""The data of a run whose clients' examples are at sites: those of the server, and the sizes of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.protocol import ClientId
from fedlens.core.types import is_client
from fedlens.core.wire.census import MOST_EXAMPLES
from fedlens.data.client_datasets import ClientDataset, ClientDatasets
from fedlens.data.dataset import Dataset
from fedlens.data.federated import hold_out_each
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.roster import Roster
from fedlens.data.table import unit_numbers


@dataclass(frozen=True)
class SiteDatasets(ClientDatasets):
    """The server's `@test`, if it has any, and the sizes of what the sites have.

    Whatever asks for the examples of a client is refused; see `ClientDatasets` for the other arguments.
    """

    roster: Roster | None = None

    @property
    def _clients(self) -> Roster:
        assert self.roster is not None
        return self.roster

    @property
    def largest(self) -> int:
        """The most examples of a client."""
        return int(self._clients.sizes().max())

    def held_out_sizes(self) -> NDArray[np.int64] | None:
        """int64 [clients]: how many examples each client holds out; None if none does."""
        held_out = self._clients.held_out
        return held_out if held_out.any() else None

    def data_of(self, client: ClientId, /) -> ClientDataset:
        """The server's test examples. Raises `DataError` for a client, `KeyError` for what the server does not have."""
        if is_client(client):
            name = self._clients.ids[client]
            raise DataError(
                f"the examples of '{name}' are at its site",
                where="data.dataset",
                hint="ask the site to compute with them",
            )
        if client not in self.held():
            raise KeyError(client)
        return super().data_of(client)

    def held(self) -> dict[str, int]:
        """`@test` and its size, if there is any: nothing of the clients is here."""
        return {"@test": len(self.dataset.test)} if len(self.dataset.test) else {}


@dataclass(frozen=True)
class ExamplesHere:
    """The examples of the clients of one site.

    Attributes:
        dataset: its training split has them; the test split is empty.
        clients: by row, int64: the positions of all examples that were counted for the roster, in order; -1 for one
            that is left out since.
    """

    dataset: Dataset
    clients: Mapping[int, NDArray[np.int64]]


@dataclass(frozen=True)
class DatasetsHere(SiteDatasets):
    """The data of the clients of one site, and the sizes of all; see `ClientDatasets` for the other arguments.

    Args:
        here: the rows of the clients of this site.
    """

    here: frozenset[int] = field(default_factory=frozenset)

    def data_of(self, client: ClientId, /) -> ClientDataset:
        """The examples of a client of this site. Raises `KeyError` for all others, and for data of the server."""
        if client not in self.here:
            raise KeyError(client)
        return ClientDatasets.data_of(self, client)


def with_held_out(roster: Roster, validation: float, seed: int) -> Roster:
    """The roster with as many held-out examples for each client as `federate` holds out of the same examples.

    A census counts all examples of a client; how many it holds out depends on the sizes of all. A roster that
    has them gets the same ones again.

    Raises `DataError` if they have more examples than a federation may have.

    >>> from fedlens.core.wire.census import CountedClient, SiteCensus
    >>> roster = Roster.of(SiteCensus(name, [CountedClient(name, 10)]) for name in "ab")
    >>> with_held_out(roster, 0.2, seed=0).held_out.tolist(), with_held_out(roster, 0.2, seed=0).sizes().tolist()
    ([2, 2], [8, 8])
    """
    if (total := int((roster.examples + roster.held_out).sum())) > MOST_EXAMPLES:
        raise DataError(
            f"the sites count {total:,} examples, more than {MOST_EXAMPLES:,}",
            where="census",
            hint="look in the log for the site that counts too many, and revoke it",
        )
    if not validation:
        return roster
    rest, _, held_offsets = hold_out_each(_whole(roster), validation, seed)
    return replace(roster, examples=rest.sizes(), held_out=np.diff(held_offsets))


def _whole(roster: Roster) -> Partition:
    """All examples of the clients, one client after the other."""
    offsets = np.concatenate([[0], np.cumsum(roster.examples + roster.held_out)])
    return Partition(roster.ids, np.arange(offsets[-1]), offsets)


def federate_here(
    dataset: Dataset,
    roster: Roster,
    here: ExamplesHere,
    validation: float,
    seed: int,
    unit: str | None = None,
) -> tuple[DatasetsHere, Roster]:
    """What one site has of a federation: the same examples for its clients as `federate` gives them.

    `dataset` is that of `fedlens.data.datasets.sites`; `validation` and `seed` are those of `with_held_out`, and `unit`
    is that of `federate`.
    """
    roster, dataset = with_held_out(roster, validation, seed), with_moments(dataset, roster)
    whole = _whole(roster)
    rest, held, held_offsets = whole, None, None
    if validation:
        rest, held, held_offsets = hold_out_each(whole, validation, seed)
    starts = whole.offsets

    def there(client: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = here.clients[client][positions - starts[client]]
        return found[found >= 0]

    def joined(parts: Mapping[int, NDArray[np.int64]]) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """The positions of the clients here one after the other, and the offsets of all clients in them."""
        sizes = np.zeros(len(roster), np.int64)
        for client, positions in parts.items():
            sizes[client] = len(positions)
        empty = np.zeros(0, np.int64)
        together = np.concatenate([empty, *(parts[client] for client in sorted(parts))])
        return torch.from_numpy(together), np.concatenate([[0], np.cumsum(sizes)])

    indices, offsets = joined({client: there(client, rest[client]) for client in here.clients})
    if held is not None and held_offsets is not None:
        ends = held_offsets
        held_here = {c: there(c, held[ends[c] : ends[c + 1]]) for c in here.clients}
        held_indices, held_ends = joined(held_here)
    columns = unit_numbers(here.dataset.train.columns, unit)
    train, test = replace(here.dataset.train.tensors(), columns=columns), here.dataset.test.tensors()
    return DatasetsHere(
        replace(dataset, train=train, test=test, at_sites=False),
        indices,
        offsets,
        held_out=None if held is None else held_indices,
        held_out_offsets=None if held is None else held_ends,
        roster=roster,
        here=frozenset(here.clients),
    ), roster


def with_moments(dataset: Dataset, roster: Roster) -> Dataset:
    """The dataset with the mean and the deviation that the sites summed, if they did. Raises `DataError`."""
    if roster.moments is not None:
        mean, std = roster.moments
        if len(mean) != dataset.input_shape[0]:
            raise DataError(f"the sites summed {len(mean)} channels", where="data.dataset.input_shape")
        summed = f"mean and standard deviation were summed over {roster.images:,} images of the sites"
        chosen = {"mean": list(mean), "std": list(std)}
        dataset = replace(dataset, mean=mean, std=std, notes=(*dataset.notes, summed), chosen=chosen)
        dataset = replace(dataset, moments_of=roster.images)
    return dataset


def federate_sites(
    dataset: Dataset, roster: Roster, test: Dataset | None, validation: float, seed: int
) -> tuple[SiteDatasets, Roster]:
    """What the server has of a federation of sites.

    Args:
        dataset: that of `fedlens.data.datasets.sites`.
        roster: the clients.
        test: the dataset at the server whose test split measures the model.
        validation, seed: those of `with_held_out`.

    Raises `ConfigError` if the test images have another form, and `DataError` if mean and std are not known.
    """
    roster, dataset = with_held_out(roster, validation, seed), with_moments(dataset, roster)
    if test is not None:
        for what, one, other in (
            ("classes", dataset.classes, test.classes),
            ("input_shape", dataset.input_shape, test.input_shape),
            ("kind", dataset.kind, test.kind),
        ):
            if one != other:
                raise ConfigError(
                    f"the test images at the server have other {what}: {other}, not {one}",
                    where="data.dataset.test",
                    hint=f"set data.dataset.{what} to theirs, or choose another set",
                )
        dataset = replace(dataset, test=test.test, notes=(*dataset.notes, *test.notes), read_as=test.form)
    dataset = replace(dataset, train=dataset.train.tensors(), test=dataset.test.tensors())
    offsets = np.zeros(len(roster) + 1, np.int64)
    return SiteDatasets(dataset, torch.zeros(0, dtype=torch.int64), offsets, roster=roster), roster
