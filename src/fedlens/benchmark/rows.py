"""What the turns of a workload come to: a row of numbers for each contestant, all from the pairs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlens.benchmark.contest import Kind, Lane
from fedlens.benchmark.limit import Workload
from fedlens.benchmark.pairs import Ratio, ratio

TARGET_MS, TARGET_SHARE = 1.0, 0.01  # of overhead: so much a client, and so much of the limit


@dataclass(frozen=True)
class Row:
    """One contestant on one workload. Where it did not run all numbers are None, and `reason` says why.

    `to_limit` and `to_by_hand` are how many times as fast it is as the limit and as the batched product written by
    hand; `fedlens_to_it` how many times as fast as it `engine` is, the engine of fedlens with the shortest median in
    these turns. Overhead is against the limit,
    in milliseconds a client.
    """

    workload: str
    name: str
    kind: Kind
    about: dict[str, Any] = field(default_factory=dict)
    start_up: float = 0.0
    seconds: tuple[float, ...] = ()
    images_per_s: float | None = None
    to_limit: Ratio | None = None
    to_by_hand: Ratio | None = None
    fedlens_to_it: Ratio | None = None
    engine: str | None = None
    overhead_ms: float | None = None
    within_target: bool | None = None
    reason: str | None = None


def rows_of(workload: Workload, lanes: Sequence[Lane]) -> list[Row]:
    """The rows of a workload whose turns were taken; the lanes' seconds pair up turn by turn.

    A contestant that is set beside one that did not run has no number there.
    """
    limit = _first(lanes, "limit")
    by_hand = _first(lanes, "by hand")
    engines = [lane for lane in lanes if lane.kind == "fedlens" and lane.seconds]
    best = min(engines, key=lambda lane: statistics.median(lane.seconds), default=None)
    return [_row(workload, lane, limit, by_hand, best) for lane in lanes]


def _first(lanes: Sequence[Lane], kind: Kind) -> Lane | None:
    return next((lane for lane in lanes if lane.kind == kind and lane.seconds), None)


def _row(workload: Workload, lane: Lane, limit: Lane | None, by_hand: Lane | None, best: Lane | None) -> Row:
    row = {"workload": workload.name, "name": lane.name, "kind": lane.kind, "about": dict(lane.about)}
    if not lane.seconds:
        return Row(**row, reason=lane.reason)  # type: ignore[arg-type]
    own = lane.seconds

    def beside(other: Lane | None) -> Ratio | None:
        return ratio(other.seconds, own) if other is not None and other is not lane else None

    overhead = within = None
    if limit is not None and limit is not lane:
        more = [1000 * (mine - bare) / workload.cohort for bare, mine in zip(limit.seconds, own, strict=True)]
        beyond = [
            1000 * (mine - (1 + TARGET_SHARE) * bare) / workload.cohort
            for bare, mine in zip(limit.seconds, own, strict=True)
        ]
        overhead, within = statistics.median(more), statistics.median(beyond) <= TARGET_MS
    return Row(
        **row,  # type: ignore[arg-type]
        start_up=lane.start_up,
        seconds=tuple(own),
        images_per_s=workload.images / statistics.median(own),
        to_limit=beside(limit),
        to_by_hand=beside(by_hand) if lane.kind == "fedlens" else None,
        fedlens_to_it=ratio(own, best.seconds) if best and lane.kind == "peer" else None,
        engine=best.name if best and lane.kind == "peer" else None,
        overhead_ms=overhead,
        within_target=within,
    )
