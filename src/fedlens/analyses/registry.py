"""The analyses of runs, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fedlens.base.registry import Entry, Registry

Needs: TypeAlias = Literal["local models", "local models or updates", "nothing"]
Rows: TypeAlias = list[dict[str, Any]]
AnalysisFunction: TypeAlias = Callable[..., Rows]


@dataclass(frozen=True)
class AnalysisEntry(Entry):
    """One analysis: where its function is, what it shows, and which recordings it needs."""

    needs: Needs = "local models"


_ENTRIES: Mapping[str, AnalysisEntry] = {
    "dynamics": AnalysisEntry(
        "fedlens.analyses.dynamics:dynamics", "what local training and aggregation gain, round by round"
    ),
    "optimal-aggregation": AnalysisEntry(
        "fedlens.analyses.aggregation:optimal_aggregation",
        "how much the best convex combination of the local models is above their average",
    ),
    "loss-surface": AnalysisEntry(
        "fedlens.analyses.aggregation:loss_surface",
        "losses of random convex combinations of the local models",
    ),
    "loss-plane": AnalysisEntry(
        "fedlens.analyses.aggregation:loss_plane", "losses on the plane through three local models"
    ),
    "drift": AnalysisEntry(
        "fedlens.analyses.client_drift:client_drift",
        "how far clients' updates are from their mean, and whether they agree, by layer",
        "local models or updates",
    ),
    "representation": AnalysisEntry(
        "fedlens.analyses.client_models:representation",
        "similarity of the clients' features by layer, k-NN accuracy and neural collapse",
    ),
    "calibration": AnalysisEntry(
        "fedlens.analyses.client_models:calibration",
        "reliability of the global model before and after a round, and of each local model",
    ),
    "line": AnalysisEntry(
        "fedlens.analyses.aggregation:lines", "loss along the line between two models, and its barrier"
    ),
}

ANALYSES = Registry("analysis", _ENTRIES)


def needs_of(name: str) -> Needs:
    """The recordings that an analysis needs; of a user's own, nothing is known, and it says so itself."""
    entry = _ENTRIES.get(name)
    return "nothing" if entry is None else entry.needs
