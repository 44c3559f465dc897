"""What a round leaves: its line of metrics, whether it is the best one so far, and whether it is skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlens.base.errors import RoundRefused, RunFailed
from fedlens.core.driver import Tally
from fedlens.run.build import Built
from fedlens.run.failed_round import no_accepted_update


def round_metrics(
    round: int,
    measured: Mapping[str, float],
    tally: Tally,
    seconds: float,
    elapsed: float,
    skipped: str | None = None,
) -> dict[str, Any]:
    """The line of a round.

    Args:
        measured: the metrics of its evaluation.
        tally: of its training, with the bytes and failures of its evaluation.
        seconds: of its training.
        elapsed: seconds of the run so far.
        skipped: why the round was skipped, if it was.
    """
    examples = tally.sums.get("examples", 0.0)
    extra = {name: value for name, value in tally.sums.items() if name not in ("loss", "examples", "batches")}
    return {
        **extra,  # numbers of the operation, such as the clients whose solver did not converge
        "round": round,
        **measured,
        "local_loss": tally.sums["loss"] / examples if examples and "loss" in tally.sums else None,
        "clients": tally.clients,
        "failed": tally.failed,
        "examples": int(examples),
        "batches_max": tally.batches_max,
        "bytes_up": tally.bytes_up,
        "bytes_down": tally.bytes_down,
        **({"bytes_peer": tally.bytes_peer} if tally.bytes_peer else {}),
        **({"letters_dropped": tally.letters_dropped} if tally.letters_dropped else {}),
        "seconds": in_microseconds(seconds),
        "elapsed": in_microseconds(elapsed),
        **({} if skipped is None else {"skipped": skipped}),
    }


def in_microseconds(seconds: float) -> float:
    """Seconds, rounded to microseconds."""
    return float(f"{seconds:.6f}")


def better(built: Built, best: dict[str, Any] | None, line: Mapping[str, Any]) -> dict[str, Any] | None:
    """The best round so far, by the validation score if there is validation data, else by the test score.

    Args:
        best: the best one before this round.
        line: the metrics of this round.
    """
    score, on = built.task.score, _split(built)
    metric = f"{on}_{score}"
    if score is None or not math.isfinite(line.get(metric, math.nan)):
        return best
    if best and line[metric] <= best["value"]:
        return best
    test = line.get(f"test_{score}")
    at_test = {} if on == "test" or test is None else {"test_value": test}
    return {"round": line["round"], "metric": metric, "value": line[metric], "chosen_on": on, **at_test}


def missing_score(built: Built, line: Mapping[str, Any]) -> str | None:
    """A note that no best round can be chosen, if the evaluation has metrics and the score is not among them."""
    score, split = built.task.score, _split(built)
    names = [name.removeprefix(f"{split}_") for name in line if name.startswith(f"{split}_")]
    if score is None or not names or score in names:
        return None
    return f"no best round is chosen: task.score is '{score}', and the evaluation gives {', '.join(names)}"


def _split(built: Built) -> str:
    """The data that the best round is chosen on."""
    return "validation" if "@validation" in built.federation.held else "test"


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
        self._needs_replies, self._too_few = built.algorithm.needs_replies, built.engine.too_few
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
        elif error is None and self._needs_replies and (few := self._too_few(tally.replied, tally.failed)):
            error = RoundRefused(
                few, hint="wait for the sites, or change engine.min_sites or engine.max_share"
            )
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
