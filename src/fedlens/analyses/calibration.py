"""Calibration of a classifier: reliability by bins of confidence, calibration error, NLL and Brier score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedlens.analyses.model_evaluation import ModelEvaluator
from fedlens.base.errors import ConfigError
from fedlens.core.measured import Measured, total
from fedlens.core.tree import Tree
from fedlens.tasks.classification import BINS, Classification


@dataclass(frozen=True)
class ReliabilityBin:
    """The examples whose largest probability is from `lower` to below `upper`.

    Attributes:
        lower, upper: the ends of the bin; the last one contains 1.
        confidence, accuracy: the means over these examples; None without an example.
        count: the number of examples.
    """

    lower: float
    upper: float
    confidence: float | None
    accuracy: float | None
    count: int


@dataclass(frozen=True)
class Reliability:
    """How well the probabilities of a classifier agree with its accuracy.

    Attributes:
        bins: 15 bins of equal width.
        error: the expected calibration error, sum_b n_b / n |accuracy_b - confidence_b| (Guo et al. 2017, Eq. 3).
        nll: the mean negative log-likelihood of the labels in nats.
        brier: the mean of sum_c (p_c - [y = c])^2, from 0 to 2 (Brier 1950).
        accuracy: the share of examples whose most probable class is their label.
        examples: their number.
    """

    bins: tuple[ReliabilityBin, ...]
    error: float
    nll: float
    brier: float
    accuracy: float
    examples: int

    def rows(self) -> list[dict[str, Any]]:
        """One row per bin with the fields of `ReliabilityBin`."""
        return [asdict(each) for each in self.bins]


def reliability(logits: Tensor, labels: Tensor) -> Reliability:
    """The reliability of logits [n, classes] for labels int64 [n].

    The error is the metric `calibration_error` of the task. Log-probabilities are logits, too.

    Raises `ConfigError` without an example, or for tensors of other shapes.

    >>> import torch
    >>> certain = torch.tensor([[0.8, 0.2]] * 4).log()
    >>> found = reliability(certain, torch.tensor([0, 0, 0, 1]))
    >>> round(found.error, 4), found.accuracy, round(found.brier, 4)
    (0.05, 0.75, 0.38)
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ConfigError(
            f"the logits are {list(logits.shape)} and the labels {list(labels.shape)}",
            where="logits",
            hint="give logits [n, classes] and labels [n], n at least 1",
        )
    return _summary(_sums(Classification(), logits, labels))


def reliability_of(tree: Tree, evaluator: ModelEvaluator) -> Reliability:
    """The reliability of a model on the examples of an evaluator.

    Raises `ConfigError` for a task other than classification, which has no class probabilities.
    """
    task = evaluator.task
    if not isinstance(task, Classification):
        raise ConfigError(
            f"calibration needs one distribution over classes per example, which {evaluator.task_name} does not have",
            where="task.name",
            hint="analyze a run of classification",
        )

    def parts() -> Iterable[Measured]:
        for outputs, labels in evaluator.outputs(tree):
            yield _sums(task, outputs, labels)

    return _summary(total(parts()))


def _sums(task: Classification, logits: Tensor, labels: Tensor) -> Measured:
    """What the task measures, and the Brier score."""
    found = task.measure(logits, labels)
    probabilities = logits.double().softmax(1)
    gaps = probabilities - F.one_hot(labels, logits.shape[1])
    return Measured({**found.sums, "brier": gaps.square().sum()})


def _summary(measured: Measured) -> Reliability:
    sums = {name: value.cpu() for name, value in measured.sums.items()}
    n = int(sums["examples"])
    columns = zip(
        sums["bin_confidence"].tolist(), sums["bin_correct"].tolist(), sums["bin_count"].tolist(), strict=True
    )
    bins = tuple(
        ReliabilityBin(
            k / BINS,
            (k + 1) / BINS,
            confidence / count if count else None,
            correct / count if count else None,
            count,
        )
        for k, (confidence, correct, count) in enumerate(columns)
    )
    metrics = Classification().metrics(Measured(sums))
    return Reliability(
        bins,
        metrics["calibration_error"],
        metrics["loss"],
        float(sums["brier"]) / n,
        metrics["accuracy"],
        n,
    )
