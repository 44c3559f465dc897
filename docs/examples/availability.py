"""Client availability: clients in time zones, of which some are awake in a round."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

Count = Annotated[int, Field(ge=1)]


def awake(*, clients_per_round: Count = 5, zones: Count = 4) -> object:
    """In round t, clients whose position is t modulo `zones` are asleep; of the others a cohort is drawn."""
    return Awake(clients_per_round, zones)


@dataclass(frozen=True)
class Awake:
    """A selection: `cohort` draws the clients of a round, `size` says how many there are."""

    clients_per_round: int
    zones: int

    def cohort(self, ctx):
        """The clients of this round; fewer than asked for if fewer are awake."""
        clients = ctx.federation.eligible
        there = clients[clients % self.zones != ctx.round % self.zones]
        drawn = ctx.rng.numpy("select").choice(there, min(self.clients_per_round, len(there)), replace=False)
        return [int(client) for client in np.sort(drawn)]

    def size(self, federation):
        """The number of clients a round, at most."""
        return min(self.clients_per_round, len(federation.eligible))
