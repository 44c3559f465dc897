"""Which rounds of a run are skipped, and when there are too many of them."""

from __future__ import annotations

import math

from fedlens.base.errors import RunFailed
from fedlens.core.driver import Tally
from fedlens.run.build import Built
from fedlens.run.failed_round import no_accepted_update


class SkippedRounds:
    """Decides after each round whether it counts, is skipped, or ends the run.

    A round without an accepted reply, or whose aggregate refused to make an update, is skipped, unless `max_skipped`
    rounds in a row were skipped before it. A loss that is not finite always ends the run. A round in which nobody was
    asked is not skipped, nor one in which the norm bound rejected every reply (`fedlens.core.norm_bounds`).

    Attributes:
        in_a_row: the skipped rounds since the last one with a reply.
    """

    def __init__(self, built: Built, in_a_row: int = 0) -> None:
        self._most, self._lr = built.config.max_skipped, built.config.local.lr
        self._needs_replies = built.algorithm.needs_replies
        self.in_a_row = in_a_row

    def take(self, round: int, tally: Tally, refused: RunFailed | None) -> str | None:
        """Counts a round. Returns why it is skipped; None if it counts.

        Args:
            refused: the error with which the aggregate refused to make an update.

        Raises `RunFailed` if the round ends the run.
        """
        error, finite = refused, math.isfinite(tally.sums.get("loss", 0.0))
        if not finite or (tally.failed_round and self._needs_replies):
            error = no_accepted_update(round, tally, self._lr)
        if error is None:
            self.in_a_row = 0 if tally.clients else self.in_a_row
            return None
        if finite and self.in_a_row < self._most:
            self.in_a_row += 1
            return error.what
        if finite and self._most:
            several = f"the {self.in_a_row} rounds before it were"
            before = "the round before it was" if self.in_a_row == 1 else several
            more = f"{error.what}; {before} skipped, and no more may be in a row"
            raise RunFailed(
                more, hint=f"{error.hint}; or raise max_skipped" if error.hint else "raise max_skipped"
            )
        raise error

    def unchanged(self, tally: Tally) -> bool:
        """Whether the state stays as it was, although the round counts: the norm bound rejected every reply."""
        return self._needs_replies and bool(tally.unbounded) and tally.clients == 0
