"""The errors of a round that ends the run, and the clients that sent values which are not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fedlens.base.errors import RunFailed
from fedlens.base.summary_text import listed
from fedlens.core.driver import Tally
from fedlens.core.schema import not_finite
from fedlens.core.types import ClientId, is_client

TYPICAL_LR = 0.1  # a typical local.lr


def no_accepted_update(round: int, tally: Tally, lr: float) -> RunFailed:
    """The error when no reply of a round was accepted."""
    reasons = Counter(reason for counts in tally.failures.values() for reason in counts)
    if not reasons:
        return diverged(round, lr)
    reason, times = reasons.most_common(1)[0]
    hint = "the same error at every client usually comes from the model, the data or the algorithm"
    if not_finite(reason):
        hint = _too_high(lr)
    return RunFailed(
        f"no client update of round {round} was accepted: {reason} ({times} of {tally.failed})", hint=hint
    )


def diverged(round: int, lr: float) -> RunFailed:
    """The error when the loss is not finite."""
    return RunFailed(
        f"the loss of round {round} is not a finite number",
        hint=_too_high(lr),
    )


def _too_high(lr: float) -> str:
    smaller = f"{TYPICAL_LR:g}" if lr > 1 else "a tenth"
    return f"usually the learning rate is too high: local.lr is {lr:g}, try {smaller}, or set local.clip_norm"


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
