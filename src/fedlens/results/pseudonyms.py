"""A run over sites under pseudonyms, for a page that is passed on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from random import SystemRandom
from typing import Any

import numpy as np

from fedlens.base.errors import RunDirectoryError
from fedlens.data.partition.roster import Roster
from fedlens.files.text_files import read_json
from fedlens.identity.private_files import write_private
from fedlens.results.run import Run


class PseudonymRun(Run):
    """A run whose sites are "site 1", "site 2", and their clients "site 2/1", in everything that is read of it.

    The numbers are drawn at random, since those of sorted names could be guessed. They stay: `pseudonyms.json` of the
    run directory has each name, for its owner alone. Rows are in the order of the pseudonyms. Names are found in upper
    and lower case, not inside other words.

    Raises `RunDirectoryError` when its names are needed and its data were not at sites.
    """

    @cached_property
    def pseudonyms(self) -> Mapping[str, str]:
        """The pseudonym of each site and client."""
        if not self.at_sites:
            what = "the run has no sites of a federation, whose names could be replaced"
            raise RunDirectoryError(what, where=str(self.path), hint="leave out --pseudonyms")
        roster = Roster.load(self.roster_path)
        kept = read_json(self.pseudonyms_path)
        if kept is None or kept.keys() != {*roster.sites, *roster.ids}:
            kept = _drawn(roster)
            write_private(self.pseudonyms_path, (json.dumps(kept, indent=1) + "\n").encode())
        return kept

    @cached_property
    def partition(self) -> Roster:
        """The roster under pseudonyms."""
        roster = Roster.load(self.roster_path)
        ids = np.array([self.pseudonyms[name] for name in roster.ids])
        rows = np.argsort(ids)
        return replace(
            roster,
            ids=tuple(ids[rows].tolist()),
            sites=tuple(self.pseudonyms[roster.sites[row]] for row in rows),
            examples=roster.examples[rows],
            held_out=roster.held_out[rows],
        )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(self.pseudonyms, key=len, reverse=True)
        names = "|".join(map(re.escape, longest))
        # ASCII: else "ſ" would match "s", and has another lower case.
        return re.compile(rf"(?<![A-Za-z0-9_])(?:{names})(?![A-Za-z0-9_])", re.IGNORECASE | re.ASCII)

    @cached_property
    def _lower(self) -> dict[str, str]:
        return {name.lower(): pseudonym for name, pseudonym in self.pseudonyms.items()}

    def _pseudonym(self, found: re.Match[str]) -> str:
        name = found[0]
        return self.pseudonyms.get(name) or self._lower[name.lower()]

    def _hidden(self, value: Any) -> Any:
        """A plain value with pseudonyms in all texts; keys stay."""
        if isinstance(value, str):
            return self._pattern.sub(self._pseudonym, value)
        if isinstance(value, Mapping):
            return {key: self._hidden(each) for key, each in value.items()}
        return [self._hidden(each) for each in value] if isinstance(value, list) else value

    def read_config(self) -> dict[str, Any]:
        """See `RunDir`."""
        return dict(self._hidden(super().read_config()))

    def read_metrics(self) -> list[dict[str, Any]]:
        """See `RunDir`."""
        return list(self._hidden(super().read_metrics()))

    def stream_clients(self) -> Iterator[dict[str, Any]]:
        """See `RunDir`."""
        return (self._hidden(row) for row in super().stream_clients())

    def read_environment(self) -> dict[str, Any] | None:
        """See `RunDir`."""
        return self._with_texts(super().read_environment())

    def read_summary(self) -> dict[str, Any] | None:
        """See `RunDir`."""
        return self._with_texts(super().read_summary())

    def _with_texts(self, content: dict[str, Any] | None) -> dict[str, Any] | None:
        if content is None:
            return None
        failures = content.get("failures")  # by client
        hidden = (
            {self._hidden(key): each for key, each in failures.items()}
            if isinstance(failures, Mapping)
            else {}
        )
        return {**self._hidden(content), **({"failures": hidden} if hidden else {})}


def _drawn(roster: Roster) -> dict[str, str]:
    """A pseudonym for each site and each client of a roster, with random numbers."""
    random, names = SystemRandom(), dict[str, str]()
    sites = random.sample(sorted(set(roster.sites)), len(set(roster.sites)))
    for number, site in enumerate(sites, start=1):
        names[site] = f"site {number}"
        clients = [roster.ids[row] for row in roster.rows_of(site) if roster.ids[row] != site]
        drawn = enumerate(random.sample(clients, len(clients)), start=1)
        names |= {client: f"site {number}/{count}" for count, client in drawn}
    return names
