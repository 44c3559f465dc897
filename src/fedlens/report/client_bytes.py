"""What training sends to and by one client: in a round that it takes part in, and in all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedlens.algorithms.client_evaluation import EVALUATE_OWN
from fedlens.base.format import finite
from fedlens.results.run import Run, subtable


def client_bytes(runs: Sequence[Run]) -> dict[str, float] | None:
    """Bytes of one client, as means over runs; None if no run trained at clients and counted its messages.

    Keys: `down_round` and `up_round`, of a client that takes part in a round; `down` and `up`, in all rounds, the mean
    of all clients; `measuring_down` and `measuring_up`, of one evaluation at the clients, which the others leave out.
    """
    counted = [each for run in runs if (each := _of_run(run)) is not None]
    if not counted:
        return None
    return {key: statistics.fmean(each[key] for each in counted) for key in counted[0]}


def _of_run(run: Run) -> dict[str, float] | None:
    rows = subtable(subtable(run.summary, "traffic"), "clients")
    traffic = {op: subtable(rows, op) for op in rows}
    clients, replies = run.clients(), sum(value for value in run.finite("clients"))
    if not clients or not replies or not traffic:
        return None
    measuring = traffic.pop(EVALUATE_OWN, {})
    counted: dict[str, float] = {}
    for way, messages in (("down", "asks"), ("up", "replies")):
        total = sum(finite(row.get(f"bytes_{way}")) or 0.0 for row in traffic.values())
        measured, times = (finite(measuring.get(key)) for key in (f"bytes_{way}", messages))
        counted |= {
            f"{way}_round": total / replies,
            way: total / clients,
            f"measuring_{way}": (measured or 0.0) / (times or 1.0),
        }
    return counted
