"""Rows of each analysis, as an analysis of a run of two clients writes them, made by formulas."""

from __future__ import annotations

import math
from typing import Any

_ROUNDS = (1, 2, 4)
_LAYERS = ("0.weight", "0.bias", "2.weight")


def _dynamics() -> list[dict[str, Any]]:
    rows = []
    for at in _ROUNDS:
        before, local, after = 0.1 * at, 0.08 * at + 0.05, 0.1 * at + 0.07
        gains = {"local_gain": local - before, "aggregation_gain": after - local}
        rows.append(
            {"round": at, "metric": "accuracy", "before": before, "local": local, "after": after, **gains}
        )
    return rows


def _surface() -> list[dict[str, Any]]:
    rows = []
    for at in _ROUNDS:
        losses = [2.0 / at + 0.1 * math.sin(7 * k) for k in range(40)]
        ends = {"low": min(losses), "high": max(losses), "mean": sum(losses) / len(losses)}
        rows.append({"round": at, "average": 1.9 / at, **ends, "losses": [*losses, None]})
    return rows


def _plane() -> list[dict[str, Any]]:
    points = [
        {"round": 4, "x": x, "y": y, "loss": None if x == y == 2.0 else 1 + (x - 0.7) ** 2 + y * y}
        for x in (-0.5, 0.25, 1.0, 2.0)
        for y in (-0.5, 1e-9, 2.0)
    ]
    models = [(0, 0.0, 0.0, 1.5), (3, 1.5, 0.0, 1.6), (5, 0.7, 1.2, None)]
    return points + [{"round": 4, "client": c, "x": x, "y": y, "loss": loss} for c, x, y, loss in models]


def _calibration() -> list[dict[str, Any]]:
    def bins(by: float) -> list[dict[str, Any]]:
        shares = [(k + 0.5) / 5 for k in range(5)]
        return [{"count": 3 * k, "confidence": x, "accuracy": x * by} for k, x in enumerate(shares)]

    models = (("before", None, 0.6), ("local", 0, 0.7), ("local", 1, 0.8), ("after", None, 0.9))
    return [
        {"round": at, "model": model, "client": client, "error": (1 - by) / at, "bins": bins(by)}
        for at in _ROUNDS
        for model, client, by in models
    ]


def _representation() -> list[dict[str, Any]]:
    layered = [
        {
            "round": at,
            "layer": layer,
            "between_clients": None if at == 1 and k == 2 else 0.9 / (1 + k) + at / 100,
        }
        for at in _ROUNDS
        for k, layer in enumerate(_LAYERS)
    ]
    separated = [
        {
            "round": at,
            "layer": "last",
            "knn_accuracy": 0.2 * at,
            "within": 9 / at,
            "simplex": None if at == 4 else 0.5,
        }
        for at in _ROUNDS
    ]
    return layered + separated


ROWS: dict[str, list[dict[str, Any]]] = {
    "dynamics": _dynamics(),
    "optimal-aggregation": [
        {"round": at, "metric": "loss", "average": 2.0 / at, "optimal": 1.9 / at, "gap": 0.1 / at} for at in _ROUNDS
    ],
    "loss-surface": _surface(),
    "loss-plane": _plane(),
    "drift": [
        {"round": at, "layer": layer, "kind": "Linear", "clients": 2, "orthogonal": 0.71,
         "cosine": None if at == 2 and layer == "0.bias" else 0.9 / at,
         "agreeing": 1.5 / at, "diversity": 1.0 + at / 10}
        for at in _ROUNDS for layer in ("all", *_LAYERS)
    ],
    "line": [
        {"round": at, "from": "before", "to": to, "t": t, "loss": 1 + t * (1 - t) / at + 0.1 * at, "barrier": 0.25 / at}
        for at in _ROUNDS for to in ("client 0", "client 3") for t in (0.0, 0.5, 1.0)
    ],
    "representation": _representation(),
    "calibration": _calibration(),
}  # fmt: skip
"""The rows by analysis."""
