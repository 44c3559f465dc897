"""What training sends to and by one client: in a round that it takes part in, and in all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedlens.report.format import finite
from fedlens.report.read import Row, Run


def client_bytes(runs: Sequence[Run]) -> dict[str, float] | None:
    """Bytes of one client, as means over runs; None if no run trained at clients and counted bytes.

    Keys: `down_round` and `up_round`, of a client that takes part in a round; `down` and `up`, in all rounds, the mean
    of all clients; `measuring_down` and `measuring_up`, of one evaluation at the clients, which the others leave out.
    """
    counted = [each for run in runs if (each := _of_run(run)) is not None]
    if not counted:
        return None
    return {key: statistics.fmean(each[key] for each in counted) for key in counted[0]}


def _of_run(run: Run) -> dict[str, float] | None:
    clients = run.clients()
    trained = [line for line in run.metrics if line["round"] and line.get("clients")]
    replies = sum(finite(line["clients"]) or 0 for line in trained)
    if not clients or not replies:
        return None
    counted: dict[str, float] = {}
    for way in ("down", "up"):
        # Nothing is trained before the first round, so its bytes are those of an evaluation.
        measuring = sum(finite(line.get(f"bytes_{way}")) or 0 for line in run.metrics if line["round"] == 0)
        total = sum(
            max(0.0, (finite(line.get(f"bytes_{way}")) or 0) - (measuring if _measured(line) else 0.0))
            for line in trained
        )
        counted |= {
            f"{way}_round": total / replies,
            way: total / clients,
            f"measuring_{way}": measuring / clients,
        }
    return counted


def _measured(line: Row) -> bool:
    return any(key.startswith(("clients_", "validation_")) for key in line)
