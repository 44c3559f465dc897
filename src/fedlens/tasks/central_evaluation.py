"""The central evaluation: the server measures its model on what it holds, shared out over the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.base.threads import first
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.measured import Measured, Total, total
from fedlens.core.modules import Loadable, loadable
from fedlens.core.protocol import (
    Answers,
    Ask,
    Client,
    Evaluation,
    Failure,
    FederationInfo,
    Metrics,
    ModelSpec,
    Outcome,
    Payload,
    Request,
)
from fedlens.core.random import Rng
from fedlens.core.schema import MEASUREMENTS
from fedlens.core.tree import Tree
from fedlens.tasks.evaluation_size import FULL, EvaluationSize
from fedlens.tasks.task import Task

MISTAKES = "mistakes."  # the beginning of the names of rows
CONFIDENCES = "confidences."
FIRST: Payload = MappingProxyType({})  # of a model with the shapes of the first
TOP_CLASSES = 5  # most probable classes of each example, in `confidences.classes`


@dataclass(frozen=True)
class Evaluate:
    """The operation that measures a model on a stretch of data at the server.

    Payload: `model`, a tree, and `varied` if its shapes are not those of the first one (`ModelSpec.of`); `start` and
    `stop`, positions; and `mistakes`, how many of the most confidently wrong answers to send, none by default. It sends
    back the task's measurements, with `mistakes.index` and so on among the rows; see
    `fedlens.tasks.task.Task.mistakes`. The index is a position in that data.
    """

    model: ModelSpec
    task: Task
    batch_size: int
    size: EvaluationSize = FULL

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Runs the model in evaluation mode, without gradients."""
        learner = loadable(self.model.of(payload), client)
        learner.load(payload["model"])
        stretch = payload["start"], payload["stop"]
        most = payload.get("mistakes", 0)
        found = measured(self.task, learner, client.data, self.batch_size, *stretch, most, self.size)
        return Outcome(found.to_payload())


def measured(
    task: Task,
    learner: Loadable,
    data: Any,
    batch_size: int,
    start: int,
    stop: int,
    mistakes: int = 0,
    size: EvaluationSize = FULL,
    confidences: bool = False,
) -> Measured:
    """The task's measurements on the examples from `start` to before `stop`, in evaluation mode.

    With `mistakes`, the rows have so many of the most confidently wrong answers, as `Evaluate` sends them. With
    `confidences`, they have the label and the five most probable classes of each example, each name after
    `confidences.`; see `fedlens.tasks.task.Task.confidences`.
    """
    module = learner.module.eval()

    def each() -> Iterator[Measured]:
        at = start
        for inputs, targets in first(data.stretches(start, stop, batch_size), None, ending):
            outputs, found = _on_batch(task, module, inputs, targets, size)
            if mistakes:
                found = _with_mistakes(found, task.mistakes(outputs, targets, mistakes), at)
            if confidences:
                found = _with_rows(found, CONFIDENCES, task.confidences(outputs, targets, TOP_CLASSES))
            at += len(targets)
            yield found

    with ExitStack() as ending, torch.inference_mode():
        found = total(each())
        return _most_confident(found, mistakes) if mistakes else found


def measured_together(
    task: Task,
    learners: Sequence[Loadable],
    data: Any,
    batch_size: int,
    start: int,
    stop: int,
    size: EvaluationSize = FULL,
    each: Callable[[Callable[[Loadable], Measured], Sequence[Loadable]], Iterable[Measured]] = map,
) -> list[Measured]:
    """What `measured` returns for each of several models, to the bit; each batch is read once for all of them.

    `each` calls a function for every model in turn, or in threads.
    """
    totals = [Total() for _ in learners]
    for learner in learners:
        learner.module.eval()
    with ExitStack() as ending, torch.inference_mode():
        for inputs, targets in first(data.stretches(start, stop, batch_size), None, ending):

            def on_batch(learner: Loadable, inputs: Any = inputs, targets: Any = targets) -> Measured:
                with torch.inference_mode():  # `each` may call it in another thread
                    return _on_batch(task, learner.module, inputs, targets, size)[1]

            for total_of_model, found in zip(totals, each(on_batch, learners), strict=True):
                total_of_model.add(found)
    return [total_of_model.result() for total_of_model in totals]


def _on_batch(
    task: Task, module: nn.Module, inputs: Any, targets: Any, size: EvaluationSize
) -> tuple[Any, Measured]:
    """The outputs for a batch, and what the task measures on them."""
    outputs = size(task, module, inputs, targets)
    return outputs, _checked(task, task.measure(outputs, targets))


def _with_mistakes(found: Measured, mistakes: Mapping[str, Tensor], at: int) -> Measured:
    """The measurements of a batch that starts at position `at`, with its mistakes as rows."""
    placed = {**mistakes, "index": mistakes["index"] + at} if mistakes else {}
    return _with_rows(found, MISTAKES, placed)


def _with_rows(found: Measured, prefix: str, rows: Mapping[str, Tensor]) -> Measured:
    return Measured(found.sums, {**found.rows, **{prefix + name: values for name, values in rows.items()}})


def _most_confident(found: Measured, most: int) -> Measured:
    """The measurements with at most so many mistakes; of equal confidence, the one with the lowest index."""
    rows = {name: values for name, values in found.rows.items() if name.startswith(MISTAKES)}
    if not rows:
        return found
    order = rows[f"{MISTAKES}confidence"].argsort(descending=True, stable=True)[:most]
    return Measured(found.sums, {**found.rows, **{name: values[order] for name, values in rows.items()}})


def _checked(task: Task, found: Any) -> Measured:
    """The measurements of a batch. Raises `ConfigError` if a user's own task returns something else."""
    if isinstance(found, Measured):
        return found
    raise ConfigError(
        f"`measure` of the task {type(task).__name__} returned a {type(found).__name__}",
        where="task.name",
        hint="return a fedlens.core.measured.Measured",
    )


def stretch_of(values: int) -> int:
    """The examples that one request evaluates, for examples of so many values.

    A fixed cut by work: few large images keep all workers busy, and the number of workers does not show in the result.

    >>> stretch_of(28 * 28), stretch_of(3 * 224 * 224)
    (1000, 27)
    """
    return min(1000, max(1, 2**22 // max(1, values)))


def automatic_batch(inputs: int, outputs: int) -> int:
    """The batch size of evaluations for so many values of an example's input and output: 500, or less.

    It is halved until float32 inputs and outputs take at most 256 MiB.

    >>> automatic_batch(28 * 28, 10), automatic_batch(3 * 224 * 224, 1000)
    (500, 250)
    """
    size = 500
    while size > 1 and size * (inputs + outputs) * 4 > 2**28:
        size //= 2
    return size


def stretches_of(examples: int, input_shape: Sequence[int]) -> list[tuple[int, int]]:
    """The (start, stop) of each request that evaluates so many examples of this shape; see `stretch_of`.

    >>> stretches_of(1500, (1, 28, 28))
    [(0, 1000), (1000, 1500)]
    """
    stretch = stretch_of(prod(input_shape))
    return [(start, min(start + stretch, examples)) for start in range(0, examples, stretch)]


def evaluation_batch(
    setting: int | Literal["auto"], task: Task, info: DatasetInfo, size: EvaluationSize
) -> int:
    """The batch size for the setting `evaluation.batch_size`; for "auto", what fits images of this size."""
    if setting != "auto":
        return setting
    evaluated = max(info.input_shape, size.input_shape(info.input_shape), key=prod)
    return automatic_batch(prod(evaluated), task.output_values(replace(info, input_shape=evaluated)))


def central(
    model: Tree,
    federation: FederationInfo,
    task: Task,
    names: Sequence[str],
    op: str = "evaluate",
    varying: Payload = FIRST,
) -> Generator[Ask, Answers, dict[str, Measured]]:
    """Asks for the measurements of `model` on each of `names` (`@test`, ...), stretch by stretch; `op` makes them.

    `varying` is that of the model (`ModelSpec.varying`).

    The stretches are a fixed cut (`stretch_of`) and are added in order, so the number of workers does not show in the
    result. A name without examples is left out.

    Raises `RunFailed` where the evaluation itself fails.
    """
    requests = [
        Request(name, {"start": start, "stop": stop})
        for name in names
        for start, stop in stretches_of(federation.held[name], federation.input_shape)
    ]
    parts: dict[str, Total] = {}
    for answer in (yield Ask(op, requests, {"model": model, **varying}, expect=MEASUREMENTS)):
        if isinstance(answer, Failure):
            raise RunFailed(f"evaluating the model on {answer.client} failed: {answer.reason}")
        parts.setdefault(str(answer.client), Total()).add(Measured.from_payload(answer.payload))
    return {name: part.result().downloaded() for name, part in parts.items()}


def central_metrics(
    model: Tree, federation: FederationInfo, task: Task, names: Sequence[str], varying: Payload = FIRST
) -> Evaluation:
    """Asks for the metrics of `model` on each of `names`: `test_loss`, `test_accuracy` and so on; see `central`."""
    found = yield from central(model, federation, task, names, varying=varying)
    metrics: Metrics = {}
    for name in names:
        values = task_metrics(task, found.get(name))
        metrics |= {f"{name[1:]}_{metric}": value for metric, value in values.items()}
    return metrics


def task_metrics(task: Task, measured: Measured | None) -> dict[str, float]:
    """The task's metrics, the score first but for the loss; without measurements the loss alone, as NaN."""
    values = dict.fromkeys(task.errors & {"loss"}, math.nan) if measured is None else task.metrics(measured)
    return score_first(values, task.score)


def score_first(metrics: Mapping[str, float], score: str | None) -> dict[str, float]:
    """The metrics with the score before all others but the loss: a line of progress shows the first one.

    >>> score_first({"loss": 0.5, "map": 0.3, "map50": 0.6}, "map50")
    {'loss': 0.5, 'map50': 0.6, 'map': 0.3}
    """
    first = [name for name in ("loss", score) if name in metrics]
    return {name: metrics[name] for name in (*first, *metrics) if name is not None}
