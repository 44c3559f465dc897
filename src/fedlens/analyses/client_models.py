"""What local models have learned: similar representations, and calibrated probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from fedlens.analyses.calibration import Reliability, reliability_of
from fedlens.analyses.model_evaluation import ModelEvaluator
from fedlens.analyses.opened_run import OpenedRun
from fedlens.analyses.representation import classifier_inputs, neural_collapse, similarity
from fedlens.base.errors import ConfigError
from fedlens.core.tree import Tree
from fedlens.tasks.classification import Classification
from fedlens.tasks.nearest_neighbours import knn_accuracy

LAST = "last layer"  # in place of the name of a layer
NEIGHBOURS = 20  # of the k-NN accuracy, by default


def representation(
    run: OpenedRun,
    *,
    examples: Annotated[
        int,
        Field(ge=2, description="examples on which features are compared, at equal distances in the data"),
    ] = 1000,
    layers: Annotated[
        list[str] | None, Field(description="names of modules; by default at most 12 with weights")
    ] = None,
    k: Annotated[
        int | None, Field(ge=1, description="neighbours of the k-NN accuracy; by default 20")
    ] = None,
) -> list[dict[str, Any]]:
    """How similar the clients' features are by layer, and how they separate the classes.

    Returns:
        a row per round and layer: `round`; `layer`, its path; `kind`, its class; and means of the linear CKA (Kornblith
        et al. 2019): `between_clients`, over the pairs of local models; `to_before`, between local models and the
        global model before the round; and `rounds`, between the global model after the round and after the recorded
        round before. For classifiers, a further row with the layer "last layer" has `knn_accuracy` of the features of
        the global model after the round (even examples vote on odd ones; None if fewer than 20 vote and `k` is not
        set), and its neural collapse (`within`, `norms`, `angles`, `simplex`, `classifier`; Papyan et al. 2020).

    Raises `RunDirectoryError` if no local models are recorded, and `ConfigError` for a layer that the model lacks, and
    for a `k` larger than the number of examples that vote.
    """
    evaluator = run.evaluator.evenly(examples)
    rows: list[dict[str, Any]] = []
    earlier: Tree | None = None
    for recorded in run.with_models:
        before, after = recorded.before(), recorded.after()
        local = [recorded.local_model(reply, before) for reply in recorded.trained]
        globals_ = [before, after, *([earlier] if earlier is not None else [])]
        found = similarity([*local, *globals_], evaluator, layers, examples)
        for layer, matrix in zip(found.layers, found.values, strict=True):
            m = len(local)
            rows.append(
                {
                    "round": recorded.round,
                    "layer": layer,
                    "kind": evaluator.layer_kinds[layer],
                    "between_clients": _mean([matrix[i][j] for i in range(m) for j in range(i)]),
                    "to_before": _mean([matrix[i][m] for i in range(m)]),
                    "rounds": matrix[m + 1][m + 2] if earlier is not None else None,
                }
            )
        earlier = after
        if isinstance(run.built.task, Classification):
            rows.append({"round": recorded.round, "layer": LAST, **_separation(after, evaluator, k)})
    return rows


def _separation(tree: Tree, evaluator: ModelEvaluator, k: int | None) -> dict[str, Any]:
    """k-NN accuracy and neural collapse of a model; None where the model or the examples do not define them."""
    try:
        inputs, labels, classifier = classifier_inputs(tree, evaluator)
    except ConfigError:
        return {}  # a model without a linear layer: its similarities are shown alone
    values: dict[str, Any] = {"knn_accuracy": None}
    with suppress(ConfigError):  # the examples are of one class
        collapse = asdict(neural_collapse(inputs, labels, classifier))
        values |= {name: value for name, value in collapse.items() if name != "classes"}
    if k is not None and k > len(inputs[::2]):
        raise ConfigError(
            f"{len(inputs[::2]):,} examples vote, fewer than the {k:,} neighbours",
            where="representation.k",
            hint=f"set it to at most {len(inputs[::2])}",
        )
    with suppress(ConfigError):  # fewer examples than the default number of neighbours, or one class
        values["knn_accuracy"] = knn_accuracy(
            inputs[::2], labels[::2], inputs[1::2], labels[1::2], NEIGHBOURS if k is None else k
        )
    return values


def calibration(run: OpenedRun) -> list[dict[str, Any]]:
    """The reliability of the global model before and after each recorded round, and of each local model.

    Returns:
        a row per round and model: `round`; `model` ("before", "after" or "local"); `client`, of a local one;
        `error`, the expected calibration error (Guo et al. 2017); `nll` in nats; `brier`; `accuracy`; and `bins`, each
        with `confidence`, `accuracy` and `count`.

    Raises `RunDirectoryError` if no local models are recorded, and `ConfigError` for a task without class
    probabilities.
    """
    run.announce(sum(len(recorded.trained) + 2 for recorded in run.with_models))
    rows: list[dict[str, Any]] = []
    for recorded in run.with_models:
        before = recorded.before()
        rows.append(_reliability(recorded.round, "before", None, reliability_of(before, run.evaluator)))
        for reply in recorded.trained:
            model = recorded.local_model(reply, before)
            found = reliability_of(model, run.evaluator)
            rows.append(_reliability(recorded.round, "local", reply.client, found))
        after = reliability_of(recorded.after(), run.evaluator)
        rows.append(_reliability(recorded.round, "after", None, after))
    return rows


def _reliability(round: int, model: str, client: str | None, found: Reliability) -> dict[str, Any]:
    return {
        "round": round,
        "model": model,
        "client": client,
        "error": found.error,
        "nll": found.nll,
        "brier": found.brier,
        "accuracy": found.accuracy,
        "bins": [
            {"confidence": each.confidence, "accuracy": each.accuracy, "count": each.count}
            for each in found.bins
        ],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
