"""The metrics of a round: its line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.core.driver import Tally


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
