"""The engine of `fedlens replay`: `inline`, with the absences and failures of a run over sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedlens.core.protocol import ClientId, ClientStates, Id, Program
from fedlens.data.partition.roster import Roster
from fedlens.engines.devices import Computing
from fedlens.engines.inline import Inline


class Replayed(Inline):
    """Computes in this process what sites computed, and fails where they failed.

    Args:
        roster: the clients and their sites.
        min_sites: sites that a round needs.
        available: the clients that could be asked, for each round from round 1 on.
        failures: the requests that failed, and why.
        threads, computing: as those of `inline`.
    """

    def __init__(
        self,
        roster: Roster,
        min_sites: int,
        available: Sequence[Sequence[int]],
        failures: Mapping[Id, str],
        threads: int,
        computing: Computing,
    ) -> None:
        super().__init__(threads, computing=computing)
        self._roster, self._min_sites, self._failures = roster, min_sites, failures
        self._available = iter(available)

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program. Raises `ConfigError` as `check` does."""
        super().open(program, states)
        self._executor.failures = self._failures

    def online(self) -> Sequence[int]:
        """The clients that could be asked in the round that begins; called once a round, as the runner does."""
        return next(self._available)

    def too_few(self, replied: Collection[ClientId]) -> str | None:
        """See `Roster.too_few`."""
        return self._roster.too_few(replied, self._min_sites)
