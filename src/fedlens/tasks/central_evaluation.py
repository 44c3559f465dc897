"""The central evaluation: the server measures its model on what it holds, shared out over the workers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedlens.core.errors import RunFailed
from fedlens.core.modules import loadable
from fedlens.core.protocol import (
    Ask,
    Client,
    Evaluation,
    Failure,
    Metrics,
    ModelSpec,
    Outcome,
    Payload,
    Request,
)
from fedlens.core.random import Rng
from fedlens.core.tree import Tree
from fedlens.tasks.task import Task


@dataclass(frozen=True)
class Evaluate:
    """The operation that measures a model on a stretch of its holder's data.

    Payload: `model`, a tree; `start` and `stop`, positions. It sends back the task's sums.
    """

    model: ModelSpec
    task: Task
    batch_size: int

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Runs the model in evaluation mode, without gradients."""
        learner = loadable(self.model, client)
        learner.load(payload["model"])
        learner.module.eval()
        sums: dict[str, float] = defaultdict(float)
        with torch.inference_mode():
            for start in range(payload["start"], payload["stop"], self.batch_size):
                stop = min(start + self.batch_size, payload["stop"])
                inputs, targets = client.data.stretch(start, stop)
                for name, value in self.task.sums(learner.module(inputs), targets).items():
                    sums[name] += value
        return Outcome({"sums": dict(sums)})


def central(
    model: Tree, held: Mapping[str, int], task: Task, names: Sequence[str], stretch: int = 1000
) -> Evaluation:
    """Asks for the metrics of `model` on each of `names` (`@test`, ...), in stretches of `stretch` examples.

    The metrics are called `test_loss`, `test_accuracy` and so on. The stretches are a fixed cut, and their sums are
    added in order, so the number of workers does not show in the result.

    Raises `RunFailed` where the evaluation itself fails.
    """
    requests = [
        Request(name, {"start": start, "stop": min(start + stretch, held[name])})
        for name in names
        for start in range(0, held[name], stretch)
    ]
    totals: dict[str, dict[str, float]] = {name: defaultdict(float) for name in names}
    for answer in (yield Ask("evaluate", requests, {"model": model})):
        if isinstance(answer, Failure):
            raise RunFailed(f"evaluating the model on {answer.client} failed: {answer.reason}")
        for name, value in answer.payload["sums"].items():
            totals[str(answer.client)][name] += value
    metrics: Metrics = {}
    for name, sums in totals.items():
        measured = task.metrics(sums) if sums.get("examples") else {"loss": math.nan}
        metrics |= {f"{name[1:]}_{metric}": value for metric, value in measured.items()}
    return metrics
