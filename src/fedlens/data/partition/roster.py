"""The clients of a run whose data are at sites: their names and numbers of examples, in place of a partition."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json
from fedlens.core.wire.census import SiteCensus
from fedlens.files.atomic_files import read_regular, write_atomically

FORMAT = "fedlens roster 1"
CHANGES = {"contract": "another experiment", "clients": "other clients", "examples": "more examples"}
"""What a site must not come back with, by the word that the site is told."""


@dataclass(frozen=True, eq=False)
class Roster:
    """The clients by row, frozen before the first round.

    Args:
        ids: the name of each client, sorted: the position is its row.
        sites: the site of each client.
        examples, held_out: int64 [clients], the most that each trains on and holds out. Data may shrink in a run.
        contract: SHA-256 of the experiment that all sites approved, in hexadecimal.
        moments: the mean and the standard deviation of each channel over all sites, if the sites summed them.
        images: how many images `moments` are of.

    Raises `DataError` if they contradict each other.

    >>> from fedlens.core.wire.census import CountedClient
    >>> roster = Roster.of([SiteCensus("b", [CountedClient("b", 5)]), SiteCensus("a", [CountedClient("a", 3)])])
    >>> roster.ids, roster.sizes().tolist(), roster.row("b"), len(roster)
    (('a', 'b'), [3, 5], 1, 2)
    """

    ids: tuple[str, ...]
    sites: tuple[str, ...]
    examples: NDArray[np.int64]
    held_out: NDArray[np.int64]
    contract: str = ""
    moments: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    images: int = 0

    census = None  # the sites do not tell their classes
    spec: Mapping[str, Any] = field(default_factory=lambda: {"name": "sites"}, init=False)
    dataset: str = field(default="sites", init=False)
    features: Mapping[str, NDArray[np.float64]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        sizes = {len(self.ids), len(self.sites), len(self.examples), len(self.held_out)}
        if len(sizes) > 1 or not self.ids or list(self.ids) != sorted(set(self.ids)):
            raise DataError(
                "not a valid roster: it needs sorted, different names, and a site and sizes for each"
            )
        if (self.examples < 0).any() or (self.held_out < 0).any() or not self.examples.any():
            raise DataError("no site has an example to train on")

    @classmethod
    def of(cls, censuses: Iterable[SiteCensus]) -> Roster:
        """The roster of these sites. Raises `DataError` if two have a name, or they approved different experiments."""
        told = sorted(censuses, key=lambda census: census.site)
        for each in told[1:]:
            if each.contract != told[0].contract:
                raise DataError(
                    f"the sites '{told[0].site}' and '{each.site}' approved different experiments",
                    where="census",
                    hint="approve the same one at both",
                )
        rows = sorted((client.name, census.site, client) for census in told for client in census.clients)
        return cls(
            tuple(name for name, _, _ in rows),
            tuple(site for _, site, _ in rows),
            np.array([client.examples for _, _, client in rows], np.int64),
            np.array([client.held_out for _, _, client in rows], np.int64),
            told[0].contract if told else "",
            *_moments(told),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def row(self, client: str) -> int:
        """The row of a client, by which algorithms know it. Raises `ValueError` for an unknown name."""
        return self.ids.index(client)

    def rows_of(self, site: str) -> list[int]:
        """The rows of a site's clients."""
        return [row for row, name in enumerate(self.sites) if name == site]

    def sizes(self) -> NDArray[np.int64]:
        """int64 [clients]: the most examples that each trains on."""
        return self.examples

    def trained_sizes(self, clients: Sequence[int]) -> NDArray[np.int64]:
        """int64: those of these clients."""
        sizes: NDArray[np.int64] = self.examples[clients]
        return sizes

    def changed_in(self, census: SiteCensus) -> str | None:
        """Why a site cannot take its part again: a key of `CHANGES`; None if it can. Data may shrink."""
        known = {self.ids[row]: row for row in self.rows_of(census.site)}
        if census.contract != self.contract:
            return "contract"
        if known.keys() != {client.name for client in census.clients}:
            return "clients"
        if any(
            client.examples + client.held_out > (self.examples + self.held_out)[known[client.name]]
            for client in census.clients
        ):
            return "examples"
        return None

    def check_returned(self, census: SiteCensus) -> None:
        """Raises `DataError` if a site comes back with other clients, more examples or another experiment.

        Data may shrink, by an exclusion list of the site.
        """
        what = self.changed_in(census)
        if what is not None:
            raise DataError(
                f"the site '{census.site}' comes back with {CHANGES[what]} than at the start of the run",
                where="roster.json",
                hint="give it back what it had, or start a new run",
            )

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal of all that `save` writes."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def _text(self) -> str:
        clients = [
            [name, site, int(n), int(m)]
            for name, site, n, m in zip(self.ids, self.sites, self.examples, self.held_out, strict=True)
        ]
        moments = self.moments and [list(part) for part in self.moments]
        content = {"format": FORMAT, "contract": self.contract, "moments": moments, "images": self.images}
        return json.dumps({**content, "clients": clients}, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the roster as JSON; an error leaves no partial file."""
        write_atomically(Path(path), self._text().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Roster:
        """The roster in a file that `save` wrote. Raises `DataError` if it is missing or damaged."""
        try:
            content = parse_json(read_regular(Path(path)).decode())
            if content["format"] != FORMAT:
                raise ValueError
            names, sites, examples, held_out = zip(*content["clients"], strict=True)
            mean_std = content["moments"]
            return cls(
                names,
                sites,
                np.array(examples, np.int64),
                np.array(held_out, np.int64),
                str(content["contract"]),
                None if mean_std is None else (tuple(mean_std[0]), tuple(mean_std[1])),
                int(content["images"]),
            )
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise DataError("not a readable roster", where=str(path), hint="copy it again") from error


def _moments(told: Sequence[SiteCensus]) -> tuple[tuple[tuple[float, ...], tuple[float, ...]] | None, int]:
    """((mean, std), images) of all sites; (None, 0) if none summed. Raises `DataError` if only some did."""
    sums = [each.sums for each in told if each.sums is not None]
    if not sums:
        return None, 0
    if len(sums) < len(told) or len({len(each.values) for each in sums}) > 1:
        raise DataError("some sites summed their images, or channels, and others did not", where="census")
    pixels = sum(each.pixels for each in sums)
    mean = [sum(channel) / pixels for channel in zip(*(each.values for each in sums), strict=True)]
    squares = [sum(channel) / pixels for channel in zip(*(each.squares for each in sums), strict=True)]
    std = [max(square - m * m, 0.0) ** 0.5 or 1.0 for square, m in zip(squares, mean, strict=True)]
    return (tuple(mean), tuple(std)), sum(each.images for each in sums)
