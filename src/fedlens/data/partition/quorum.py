"""Whether the sites that took part in a round are enough, and none of them alone decides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fedlens.core.protocol import Answer, Reply, Schema
from fedlens.core.types import ClientId, is_client
from fedlens.data.partition.roster import Roster


@dataclass(eq=False)
class Quorum:
    """Whether enough sites take part in a round, and none of them alone decides it.

    Args:
        roster: the clients and their sites.
        min_sites: sites that a round needs if clients fail.
        max_share: the largest share of one site in the weights of an exchange of updates.
    """

    roster: Roster
    min_sites: int
    max_share: float
    _weights: dict[int, Counter[str]] = field(default_factory=dict)  # by exchange and site

    def begin(self) -> None:
        """Begins a round."""
        self._weights.clear()

    def counted(self, answer: Answer, expect: Schema) -> Answer:
        """The same answer, with the weight of its update counted if it has one.

        The weight in masked words is not known: the number of examples that the client has told stands for it.
        """
        fields = (expect.fields or {}).keys()
        if isinstance(answer, Reply) and ({"update", "weight"} <= fields or "vector" in fields):
            row = int(answer.client)
            weight: Any = answer.payload["weight"] if "weight" in fields else float(self.roster.sizes()[row])
            self._weights.setdefault(answer.id.exchange, Counter())[self.roster.sites[row]] += weight
        return answer

    def fault(self, clients: Iterable[ClientId], failed: int) -> str | None:
        """Why the round does not count; None if it does.

        Args:
            clients: those that took part.
            failed: how many others failed.
        """
        sites = {self.roster.sites[client] for client in clients if is_client(client)}
        if failed and len(sites) < self.min_sites:
            took = "1 site" if len(sites) == 1 else f"{len(sites)} sites"
            return f"clients of {took} took part, and a round needs {self.min_sites} sites"
        for weights in self._weights.values():
            (site, weight), *_ = weights.most_common(1)
            if weight > (self.max_share + 1e-9) * weights.total():  # sums of weights are rounded
                share = weight / weights.total()
                return f"'{site}' has {share:.1%} of all weights, and at most {self.max_share:.1%} is allowed"
        return None
