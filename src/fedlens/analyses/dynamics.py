"""Training dynamics: what a round gains by local training and by aggregation (chen2022, Eq. 4, figures 2 and 10)."""

from __future__ import annotations

import math
from typing import Any

from fedlens.analyses.opened_run import OpenedRun


def dynamics(run: OpenedRun) -> list[dict[str, Any]]:
    """The gains of each recorded round, of the metric that the run is scored by.

    With the metric A on the global test set and the M clients of round t,

        A(theta^t) = A(theta^(t-1)) + local gain + aggregation gain,
        local gain = 1/M sum_m A(theta_m^t) - A(theta^(t-1)),
        aggregation gain = A(theta^t) - 1/M sum_m A(theta_m^t)                  (chen2022, Eq. 4).

    For a task without a score, A is the loss and the gains have the other sign: a fall of the loss is a gain.

    Returns:
        a row per round: `round`; `metric`, its name; `before`, `local` and `after`, the values of the global model
        before, of the local models (their mean) and of the global model after the round; `local_gain` and
        `aggregation_gain`; `local_weighted`, the mean weighted as in the average; `clients`, with `client`, `weight`,
        `value` and `loss` of each; and `loss_before`, `loss_local` and `loss_after`.

    Raises `RunDirectoryError` if no local models are recorded.
    """
    run.announce(sum(len(recorded.trained) + 2 for recorded in run.with_models))
    rows, sign = [], -1.0 if run.built.task.score is None else 1.0
    for recorded in run.with_models:
        before = recorded.before()
        models = (recorded.local_model(reply, before) for reply in recorded.trained)
        start, end = run.evaluator.several([before, recorded.after()])
        local = list(run.evaluator.several(models))
        values = [found.get(run.metric, math.nan) for found in local]
        losses = [found.get("loss", math.nan) for found in local]
        weights = [reply.weight for reply in recorded.trained]
        mean = math.fsum(values) / len(values)
        rows.append(
            {
                "round": recorded.round,
                "metric": run.metric,
                "before": start.get(run.metric, math.nan),
                "local": mean,
                "after": end.get(run.metric, math.nan),
                "local_gain": sign * (mean - start.get(run.metric, math.nan)),
                "aggregation_gain": sign * (end.get(run.metric, math.nan) - mean),
                "local_weighted": math.fsum(w * v for w, v in zip(weights, values, strict=True))
                / math.fsum(weights),
                "loss_before": start.get("loss", math.nan),
                "loss_local": math.fsum(losses) / len(losses),
                "loss_after": end.get("loss", math.nan),
                "clients": [
                    {"client": reply.client, "weight": reply.weight, "value": value, "loss": loss}
                    for reply, value, loss in zip(recorded.trained, values, losses, strict=True)
                ],
            }
        )
    return rows
