"""The clients of a round that sent values which are not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedlens.base.summary_text import listed
from fedlens.core.driver import Tally
from fedlens.core.schema import not_finite
from fedlens.core.types import ClientId, is_client

_NAMED = 5  # clients in a sentence


@dataclass(frozen=True)
class NotFiniteReplies:
    """The clients with a reply that was rejected for NaN or an infinite value, among those that were asked.

    >>> replies = NotFiniteReplies(("a", "b", "c"), 4)
    >>> replies.many, str(replies)
    (True, "3 of 4 clients sent values that are not finite: 'a', 'b', 'c'")
    >>> NotFiniteReplies(("a",), 2).many, NotFiniteReplies(("a",), 3).many
    (True, False)
    """

    clients: tuple[str, ...] = ()
    asked: int = 0

    @classmethod
    def of(cls, tally: Tally, name: Callable[[ClientId], str]) -> NotFiniteReplies:
        """Those of a round of training, in the order of the clients' numbers."""
        failed = {client: set(reasons) for client, reasons in tally.failures.items()}
        asked = {
            client
            for client in (*failed, *tally.replied, *(row["client"] for row in tally.per_client))
            if is_client(client)
        }
        sent = [client for client in sorted(asked) if any(map(not_finite, failed.get(client, ())))]
        return cls(tuple(map(name, sent)), len(asked))

    @property
    def many(self) -> bool:
        """Whether at least half of the clients sent such values."""
        return 2 * len(self.clients) >= max(1, self.asked)

    def __str__(self) -> str:
        names = listed([f"'{client}'" for client in self.clients], _NAMED)
        return f"{len(self.clients):,} of {self.asked:,} clients sent values that are not finite: {names}"
