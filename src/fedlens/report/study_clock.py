"""Simulated hours of a run: the time of its rounds on clients with the speed and the link of `[clock]`.

A synchronous round lasts as long as its slowest client (McMahan et al. 2017, algorithm 1). All simulated clients have
the same speed and link, so the slowest one is the busiest one:

    seconds = batches * batch_size / images_per_second + 8 bytes_down / (1e6 down_mbit) + 8 bytes_up / (1e6 up_mbit)

`batches` are those of the busiest client. Its examples are not recorded, so `batches * batch_size` takes their place:
an upper bound, and exact where no batch is smaller than the others. A client's bytes in a round are the mean over the
round's clients. Time of the server, and of waiting, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedlens.report.study_results import RunLine

SPEEDS = ("images_per_second", "up_mbit", "down_mbit")


def simulated_hours(line: RunLine, clock: Mapping[str, float]) -> list[float | None]:
    """The simulated hours from the start of a run to each evaluation of `line.curve`.

    Args:
        clock: `images_per_second`, `up_mbit` and `down_mbit` of a client; the link counts 10^6 bits a second. A speed
            that is missing takes no time.

    The columns "batches" and "bytes_client" of the curve are sums over rounds. The column "bytes_client_up" says how
    many of "bytes_client" go up; without it half of them do. The fact "batch_size" is needed for the time of training.

    An evaluation is None if a column or fact that the clock needs is missing; all are None without a clock.

    >>> curve = {"round": [1, 2], "batches": [10, 30], "bytes_client": [2e6, 4e6]}
    >>> line = RunLine("", "", "finished", None, 2, "test_accuracy", curve, {"batch_size": 20})
    >>> [hours * 3600 for hours in simulated_hours(line, {"images_per_second": 50, "up_mbit": 1, "down_mbit": 8})]
    [13.0, 30.0]
    """
    rounds = len(line.curve.get("round", ()))
    if not any(clock.get(speed) for speed in SPEEDS):
        return [None] * rounds
    missing: list[float | None] = [None] * rounds
    batches, sent = line.curve.get("batches", missing), line.curve.get("bytes_client", missing)
    up = line.curve.get("bytes_client_up") or [None if each is None else each / 2 for each in sent]
    size = line.facts.get("batch_size")
    hours: list[float | None] = []
    for k in range(rounds):
        parts = (
            _seconds(batches[k], size, clock.get("images_per_second")),
            _seconds(up[k], 8e-6, clock.get("up_mbit")),
            _seconds(_less(sent[k], up[k]), 8e-6, clock.get("down_mbit")),
        )
        counted = [part for part in parts if part is not None]
        hours.append(math.fsum(counted) / 3600 if len(counted) == len(parts) else None)
    return hours


def _seconds(amount: float | None, unit: float | None, speed: float | None) -> float | None:
    if not speed:
        return 0.0
    return None if amount is None or unit is None else amount * unit / speed


def _less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
