"""The engine of `fedlens replay`: `inline`, with the absences and failures of a run over sites."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence

from fedlens.core.protocol import Answer, Ask, ClientId, ClientStates, Id, Program
from fedlens.core.types import is_client
from fedlens.data.partition.quorum import Quorum
from fedlens.data.partition.roster import Roster
from fedlens.engines.devices import Computing
from fedlens.engines.inline import Inline


class Replayed(Inline):
    """Computes in this process what sites computed, and fails where they failed.

    Args:
        roster: the clients and their sites.
        min_sites, max_share: as those of `network`.
        available: the clients that could be asked, for each round from round 1 on.
        failures: the requests that failed, and why.
        threads, computing: as those of `inline`.
    """

    def __init__(
        self,
        roster: Roster,
        min_sites: int,
        max_share: float,
        available: Sequence[Sequence[int]],
        failures: Mapping[Id, str],
        threads: int,
        computing: Computing,
    ) -> None:
        super().__init__(threads, computing=computing)
        self._quorum, self._failures = Quorum(roster, min_sites, max_share), failures
        self._available = iter(available)

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program. Raises `ConfigError` as `check` does."""
        super().open(program, states)
        self._executor.failures = self._failures

    def online(self) -> Sequence[int]:
        """The clients that could be asked in the round that begins; called once a round, as the runner does."""
        self._quorum.begin()
        return next(self._available)

    def answer(self, ask: Ask, round: int, exchange: int, first: int = 0) -> Generator[Answer, None, None]:
        """Answers an ask as `Inline` does, and counts the weights of clients."""
        for answer in super().answer(ask, round, exchange, first):
            yield self._quorum.counted(answer, ask.expect) if is_client(answer.client) else answer
            del answer  # frees its tree before the next answer comes

    def too_few(self, replied: Collection[ClientId], failed: int) -> str | None:
        """See `Quorum.fault`."""
        return self._quorum.fault(replied, failed)
