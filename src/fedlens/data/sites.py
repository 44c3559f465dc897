"""The data of a run whose clients' examples are at sites: those of the server, and the sizes of the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.protocol import ClientId
from fedlens.core.types import is_client
from fedlens.data.client_datasets import ClientDataset, ClientDatasets
from fedlens.data.dataset import Dataset
from fedlens.data.partition.roster import Roster


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


def federate_sites(dataset: Dataset, roster: Roster, test: Dataset | None) -> tuple[SiteDatasets, Roster]:
    """What the server has of a federation of sites.

    Args:
        dataset: that of `fedlens.data.datasets.sites`.
        roster: the clients.
        test: the dataset at the server whose test split measures the model.

    Raises `ConfigError` if the test images have another form, and `DataError` if mean and std are not known.
    """
    if roster.moments is not None:
        mean, std = roster.moments
        if len(mean) != dataset.input_shape[0]:
            raise DataError(f"the sites summed {len(mean)} channels", where="data.dataset.input_shape")
        summed = f"mean and standard deviation were summed over {roster.images:,} images of the sites"
        chosen = {"mean": list(mean), "std": list(std)}
        dataset = replace(dataset, mean=mean, std=std, notes=(*dataset.notes, summed), chosen=chosen)
        dataset = replace(dataset, moments_of=roster.images)
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
