"""Client drift of the recorded rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedlens.analyses.drift import ALL, LayerDrift, drift, updates_of
from fedlens.analyses.opened_run import OpenedRun
from fedlens.core.tree import Tree, scale
from fedlens.observers.read_recordings import RecordedReply, RecordedRound


def client_drift(run: OpenedRun) -> list[dict[str, Any]]:
    """How far the clients' updates are from their mean, and whether they agree, by layer; see `drift`.

    Of a round without local models, what clients sent as their `update` counts.

    Returns:
        a row per round and layer, the whole model (`all`) first: `round`; `layer`; `clients`, their number; `norm`,
        `distance` and `cosine`, means over the clients weighted as in the average; `cosine_low`, the smallest cosine;
        `mean_norm`; `diversity`; `agreeing`; and, of the whole model, `by_client` with the values of each client.

    Raises `RunDirectoryError` if neither local models nor updates are recorded.
    """
    rounds = [each for each in run.recorded if each.trained or _senders(each)]
    if not rounds:
        raise run.missing("local models or updates", "record.updates")
    spec = run.built.model.leaves
    rows: list[dict[str, Any]] = []
    for recorded in rounds:
        updates: list[Tree]
        if recorded.trained:
            replies, before = recorded.trained, recorded.before()
            updates = [*updates_of([recorded.local_model(r, before) for r in replies], before, spec)]
        else:
            replies = _senders(recorded)
            # Clients send (w^t - w_k) / tau: the other way round, and with FedNova for one step.
            updates = [scale(recorded.sent(reply), -reply.numbers.get("tau", 1.0)) for reply in replies]
        found = drift(updates, [reply.weight for reply in replies])
        rows += [_row(recorded.round, layer, replies) for layer in (found.total, *found.layers)]
    return rows


def _senders(recorded: RecordedRound) -> list[RecordedReply]:
    """The replies with an update; those of the round's last exchange where there are several."""
    sent = [reply for reply in recorded.replies if "weight" in reply.numbers] if recorded.updates else []
    return [reply for reply in sent if reply.op == sent[-1].op]


def _row(round: int, layer: LayerDrift, replies: Sequence[RecordedReply]) -> dict[str, Any]:
    weights = [reply.weight for reply in replies]
    cosines = [value for value in layer.cosines if value is not None]
    row: dict[str, Any] = {
        "round": round,
        "layer": layer.layer,
        "clients": len(replies),
        "norm": _weighted_mean(layer.norms, weights),
        "distance": _weighted_mean(layer.distances, weights),
        "cosine": _weighted_mean([0.0 if c is None else c for c in layer.cosines], weights)
        if cosines
        else None,
        "cosine_low": min(cosines, default=None),
        "mean_norm": layer.mean_norm,
        "diversity": layer.diversity,
        "agreeing": layer.agreeing,
    }
    if layer.layer == ALL:
        row["by_client"] = [
            {"client": reply.client, "weight": w, "norm": norm, "distance": distance, "cosine": cosine}
            for reply, w, norm, distance, cosine in zip(
                replies, weights, layer.norms, layer.distances, layer.cosines, strict=True
            )
        ]
    return row


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
