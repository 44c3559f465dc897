"""How robust aggregation is: optimal convex weights, the loss surface between local models, lines between models."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedlens.analyses.line import line, training_batches
from fedlens.analyses.loss_surface import plane, sample_surface
from fedlens.analyses.opened_run import OpenedRun
from fedlens.base.errors import ConfigError
from fedlens.core.convex_combination import ModelMatrix
from fedlens.core.random import Rng
from fedlens.core.tree import map_tree
from fedlens.observers.read_recordings import RecordedReply, RecordedRound
from fedlens.tasks.optimal_weights import SEARCH_RATE, optimal_weights


def optimal_aggregation(
    run: OpenedRun,
    *,
    lr: Annotated[
        float, Field(gt=0, description="learning rate of the search in the softmax's inputs")
    ] = SEARCH_RATE,
    epochs: Annotated[int, Field(ge=1, description="passes over the data from each start")] = 20,
    batch_size: Annotated[int, Field(ge=1, description="examples in a step")] = 32,
    starts: Annotated[int, Field(ge=1, description="starts of the search: the centre and random points")] = 3,
    seed: Annotated[int, Field(ge=0, description="of the starts and the order of the batches")] = 0,
) -> list[dict[str, Any]]:
    """The gap between averaging and the best convex combination of the local models (chen2022, Eq. 5, figure 3).

    The weights are chosen on the data that they are evaluated on, as in the paper: the gap is an upper bound of
    what better weights could gain. See `fedlens.tasks.optimal_weights`.

    Returns:
        a row per round: `round`, `metric`, `average` and `optimal`, their values; `gap`; `distance`, the total
        variation between both weights; `loss_average` and `loss_optimal`; `clients` with `weight` and `optimal`.

    Rounds of one client are left out: there is nothing to weigh.

    Raises `RunDirectoryError` if no local models are recorded, and `ConfigError` if no round has two clients.
    """
    evaluator, rows, rounds = run.evaluator, [], _of_several(run, "optimal-aggregation")
    # A step is a forward and a backward pass, as much as three evaluations of its examples.
    run.announce(len(rounds) * (starts * (3 * epochs + 1) + 1))
    for recorded in rounds:
        models, replies = local_models(recorded, evaluator.device)
        average = torch.tensor([reply.weight for reply in replies], dtype=torch.float64)
        learner = evaluator.learner(recorded.before())
        with evaluator.computing():
            found = optimal_weights(
                evaluator.task,
                learner,
                evaluator.data,
                models,
                average,
                lr=lr,
                rng=Rng((seed, "optimal-aggregation", recorded.round)),
                epochs=epochs,
                batch_size=batch_size,
                starts=starts,
                size=evaluator.size,
            )
        before, after = found.average, found.best
        value = (before.loss, after.loss) if before.score is None else (before.score, after.score)
        rows.append(
            {
                "round": recorded.round,
                "metric": run.metric,
                "average": value[0],
                "optimal": value[1],
                "gap": found.gain,
                "distance": found.distance,
                "loss_average": before.loss,
                "loss_optimal": after.loss,
                "clients": [
                    {"client": reply.client, "weight": float(w), "optimal": float(best)}
                    for reply, w, best in zip(replies, before.weights, after.weights, strict=True)
                ],
            }
        )
    return rows


def loss_surface(
    run: OpenedRun,
    *,
    count: Annotated[int, Field(ge=2, description="random combinations in each round")] = 200,
    seed: Annotated[int, Field(ge=0, description="of the combinations")] = 0,
) -> list[dict[str, Any]]:
    """The losses of uniformly drawn convex combinations of the local models (chen2022, figures 4 and 11).

    Returns:
        a row per round: `round`; `mean`, `deviation`, `low` and `high` (2.5 and 97.5 percentiles) of the losses;
        `average`, the loss of the weighted average; `losses`, each of them.

    Rounds of one client are left out.

    Raises `RunDirectoryError` if no local models are recorded, and `ConfigError` if no round has two clients.
    """
    rounds = _of_several(run, "loss-surface")
    run.announce(count * len(rounds))
    rows = []
    for recorded in rounds:
        before = recorded.before()
        models = [recorded.local_model(reply, before) for reply in recorded.trained]
        weights = [reply.weight for reply in recorded.trained]
        found = sample_surface(models, run.evaluator, count, seed, weights)
        rows.append(
            {
                "round": recorded.round,
                "mean": found.mean,
                "deviation": found.deviation,
                "low": found.low,
                "high": found.high,
                "average": found.average_loss,
                "losses": [float(f"{loss:.6g}") for loss in found.losses],
            }
        )
    return rows


def loss_plane(
    run: OpenedRun,
    *,
    points: Annotated[int, Field(ge=2, le=201, description="on each axis of the grid")] = 15,
    margin: Annotated[float, Field(ge=0, description="around the triangle, as a share of its size")] = 0.2,
) -> list[dict[str, Any]]:
    """The losses on the plane through three local models of the last recorded round (Garipov et al. 2018).

    The models are those of the three clients with the largest weights; their average has these weights.

    Returns:
        a row per point of the grid: `round`, `x`, `y`, `loss`, and `score` if the task has one; then a row for each
        model, with its `client`, and one for their average, whose `model` is "average".

    Raises `RunDirectoryError` if no local models are recorded, and `ConfigError` for a round of fewer clients.
    """
    recorded = run.with_models[-1]
    largest = sorted(recorded.trained, key=lambda reply: -reply.weight)[:3]
    if len(largest) < 3:
        raise ConfigError(
            f"a plane goes through 3 local models, and round {recorded.round} has {len(largest)}",
            where="loss-plane",
            hint="analyze a round with three clients or more",
        )
    run.announce(points * points)
    models, weights = [recorded.local_model(reply) for reply in largest], [reply.weight for reply in largest]
    found = plane(models, run.evaluator, points, margin, weights)
    rows: list[dict[str, Any]] = [{"round": recorded.round, **row} for row in found.rows()]
    for reply, (x, y), loss in zip(largest, found.models, found.model_losses, strict=True):
        rows.append({"round": recorded.round, "client": reply.client, "x": x, "y": y, "loss": loss})
    x, y = found.average
    rows.append({"round": recorded.round, "model": "average", "x": x, "y": y, "loss": found.average_loss})
    return rows


def lines(
    run: OpenedRun,
    *,
    points: Annotated[int, Field(ge=2, description="on each line, both ends counted")] = 11,
    between: Annotated[
        Literal["clients", "rounds"],
        Field(
            description="clients: the two local models with the largest weights; rounds: successive global models"
        ),
    ] = "clients",
    recompute: Annotated[
        bool,
        Field(description="recompute the statistics of batch normalization on training data at each point"),
    ] = False,
) -> list[dict[str, Any]]:
    """The loss along lines between two models, and the barrier on them (Frankle et al. 2020).

    Returns:
        a row per point: `round`, `from` and `to`, `t`, `loss`, `score` if the task has one, and `barrier`, that of the
        whole line; `statistics` says what happens to those of batch normalization.

    Raises `RunDirectoryError` if no local models are recorded, and `ConfigError` if there are no two models.
    """
    pairs = _client_pairs(run) if between == "clients" else _round_pairs(run)
    run.announce(points * len(pairs))
    batches = training_batches(run.built) if recompute else None
    rows: list[dict[str, Any]] = []
    for round, (first, a), (second, b) in pairs:
        found = line(a, b, run.evaluator, points, batches)
        about = {"round": round, "from": first, "to": second, "barrier": found.barrier}
        rows += [{**about, "statistics": found.statistics, **row} for row in found.rows()]
    return rows


def _of_several(run: OpenedRun, analysis: str) -> list[RecordedRound]:
    """The rounds with the local models of two clients or more. Raises `ConfigError` if there is none."""
    rounds = [recorded for recorded in run.with_models if len(recorded.trained) > 1]
    if not rounds:
        raise ConfigError(
            "no recorded round has the local models of two clients, so there is nothing to combine",
            where=analysis,
            hint="record a round with several clients",
        )
    return rounds


_Named = tuple[str, dict[str, torch.Tensor]]


def _client_pairs(run: OpenedRun) -> list[tuple[int, _Named, _Named]]:
    pairs = []
    for recorded in run.with_models:
        largest = sorted(recorded.trained, key=lambda reply: -reply.weight)[:2]
        if len(largest) == 2:
            first, second = ((f"client {r.client}", recorded.local_model(r)) for r in largest)
            pairs.append((recorded.round, first, second))
    if not pairs:
        raise ConfigError(
            "no recorded round has two clients",
            where="line",
            hint="set line.between = 'rounds', or record a round with several clients",
        )
    return pairs


def _round_pairs(run: OpenedRun) -> list[tuple[int, _Named, _Named]]:
    rounds = run.with_models
    if len(rounds) == 1:
        (only,) = rounds
        return [(only.round, ("before", only.before()), ("after", only.after()))]
    return [
        (later.round, (f"round {a.round}", a.after()), (f"round {later.round}", later.after()))
        for a, later in pairwise(rounds)
    ]


def local_models(recorded: RecordedRound, device: torch.device) -> tuple[ModelMatrix, list[RecordedReply]]:
    """The local models of a round as a matrix on this device, and their replies."""
    before = recorded.before()
    models = [recorded.local_model(reply, before) for reply in recorded.trained]
    return ModelMatrix([map_tree(lambda leaf: leaf.to(device), model) for model in models]), recorded.trained


__all__ = ["lines", "local_models", "loss_plane", "loss_surface", "optimal_aggregation"]
