"""The speed goals of fedlens, checked against the rows of one benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedlens.benchmark.comparison import ComparisonRow, Ratio, ratio

OF_LIMIT, OF_CONTIGUOUS_LIMIT, OF_PEER, OF_BEST_PEER = 0.97, 1.2, 1.15, 0.97
OF_PRODUCT, OF_PEERS_LINEAR = 0.6, {"pfl": 10.0, "Flower": 50.0}


@dataclass(frozen=True)
class Goal:
    """One goal: `engine` should be at least `least` times as fast as `reference`."""

    workload: str
    engine: str
    reference: str
    least: float
    measured: Ratio

    @property
    def met(self) -> str:
        """'yes' or 'no' where the whole interval agrees, else 'within noise'."""
        if self.measured.low >= self.least:
            return "yes"
        return "no" if self.measured.high < self.least else "within noise"


def goals_of(rows: Sequence[ComparisonRow]) -> list[Goal]:
    """The goals that can be checked with these rows.

    For convolutional models, fedlens by default is checked if it was measured. Otherwise, and for the linear model,
    whose clients must be batched to reach the goals, its fastest engine is.
    """
    return [
        goal
        for workload in dict.fromkeys(row.workload for row in rows)
        for goal in _goals([row for row in rows if row.workload == workload and row.seconds])
    ]


def _goals(rows: Sequence[ComparisonRow]) -> Iterator[Goal]:
    engines = [row for row in rows if row.kind == "fedlens"]
    if not engines:
        return
    limits, peers, by_hand = (
        [row for row in rows if row.kind == kind] for kind in ("limit", "peer", "by hand")
    )
    default = None if by_hand else next((row for row in engines if row.about.get("default")), None)
    candidate = default or _fastest(engines)

    def goal(reference: str, least: float, other: ComparisonRow) -> Goal:
        return Goal(
            candidate.workload, candidate.name, reference, least, ratio(other.seconds, candidate.seconds)
        )

    if by_hand:
        yield goal(by_hand[0].name, OF_PRODUCT, by_hand[0])
        for peer in peers:
            yield goal(peer.name, OF_PEERS_LINEAR.get(peer.name.partition(" ")[0], OF_PEER), peer)
        return
    if limits:
        yield goal("limit", OF_LIMIT, _fastest(limits))
    yield from (goal("limit, contiguous", OF_CONTIGUOUS_LIMIT, row) for row in limits if _contiguous(row))
    for name in dict.fromkeys(peer.about.get("peer", peer.name) for peer in peers):
        layouts = [peer for peer in peers if peer.about.get("peer", peer.name) == name]
        documented = (peer for peer in layouts if _contiguous(peer))
        yield from (goal(f"{name}, as documented", OF_PEER, peer) for peer in documented)
        yield goal(f"{name}, in its best layout", OF_BEST_PEER, _fastest(layouts))


def _contiguous(row: ComparisonRow) -> bool:
    return row.about.get("layout") == "contiguous"


def _fastest(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    return min(rows, key=lambda row: statistics.median(row.seconds))
