"""Multi-label classification: binary cross-entropy, average precision and F1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedlens.core.dataset_info import Kind
from fedlens.core.measured import Measured
from fedlens.tasks.class_weights import ClassWeighted, ClassWeightsSetting, checked
from fedlens.tasks.picture import BLACK, GREEN, RED, captioned, enlarged
from fedlens.tasks.task import present, wrong_shape

THRESHOLD = 0.5  # the probability from which a class is predicted
_NAMED = 5  # classes in a picture


@dataclass(frozen=True, kw_only=True)
class MultiLabel(ClassWeighted):
    """Any number of classes an image. Outputs are logits [n, classes], targets uint8 [n, classes] of 0 and 1.

    The probability of class c is `sigmoid(z_c)` of its logit, independent of the other classes. A class is predicted
    from a probability of 0.5 on, so for logits of at least 0.

    Args:
        score: the metric that the best model is chosen by.
        label_smoothing: s, which replaces the targets y by (1 - s) y + s / 2 in training.
        class_weights: weights of the classes in the training loss: "none", "balanced" (m / (C m_c) at each client,
            from how often, m_c, each of C classes occurs there, m in all), or one number a class.

    Metrics, over all examples together:
        loss: the binary cross-entropy in nats, the mean over examples and classes, without weights and smoothing.
        average_precision: the mean over classes of `sum_k (R_k - R_{k-1}) P_k`, with precision P_k and recall R_k at
            the k-th largest different logit, as `sklearn.metrics.average_precision_score`: "mAP" in the literature.
        f1_micro: `2 TP / (2 TP + FP + FN)` with true and false positives and false negatives of all classes together.
        f1_macro: the mean over classes of that number.

    A class without a positive example is left out of both means. A metric that no class defines is left out.

    >>> task = MultiLabel()
    >>> outputs, targets = torch.tensor([[2.0, -1.0], [1.0, 3.0]]), torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8)
    >>> found = task.metrics(task.measure(outputs, targets))
    >>> found["f1_micro"], found["average_precision"]
    (0.8, 1.0)
    """

    score: str = "average_precision"
    label_smoothing: float = 0.0
    kind: ClassVar[Kind] = "multi-label"
    features: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "average_precision", "f1_micro", "f1_macro")
    shares: ClassVar[frozenset[str]] = frozenset({"average_precision", "f1_micro", "f1_macro"})
    totals: ClassVar[frozenset[str]] = frozenset({"loss", "examples"})
    one_class: ClassVar[bool] = False
    sends: ClassVar[str] = (
        "its summed loss, and for each class the sorted scores of its images with their labels"
    )
    measures_single_examples: ClassVar[bool] = True

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The binary cross-entropy in nats: its mean over examples i and classes c, or with weights w

            sum_ic w_c l_ic / sum_ic w_c            (normalize = false: / (n C))

        Args:
            outputs: logits [n, classes].
            targets: uint8 [n, classes].
            weights: float [classes].
            normalize: whether the denominator is the sum of the weights.
        """
        losses = self._terms(outputs, targets)
        if weights is None:
            return losses.mean()
        each = weights.to(losses)
        if not normalize:
            return (each * losses).mean()
        # The floor is for weights that are all 0; no other sum is as small.
        total = (each.sum() * len(losses)).clamp(min=torch.finfo(losses.dtype).tiny)
        return (each * losses).sum() / total

    @property
    def losses(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The mean over classes of each example's cross-entropy, [n]; None with class weights."""
        return None if self.weighs else self._losses

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._terms(outputs, targets).mean(1)

    def _terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The binary cross-entropy of each example and class, [n, classes]."""
        wanted = targets.to(outputs.dtype)
        if self.label_smoothing:
            wanted = (1 - self.label_smoothing) * wanted + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """int64 [n, classes]: 1 at each class of an example."""
        return targets.long()

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        """The sums and rows of a batch.

        Sums: `loss` float64, summed over examples and averaged over classes; `examples` int64; `true_positives`,
        `false_positives` and `false_negatives` int64 [classes]. Rows: `scores`, the logits as float32 [n, classes],
        and `targets` uint8 [n, classes]. Logits and not probabilities: those round to 1.0 from a logit of 17 on.
        """
        if outputs.device.type == "mps":  # has no float64
            outputs, targets = outputs.cpu(), targets.cpu()
        true, predicted = targets.bool(), outputs >= 0
        losses = F.binary_cross_entropy_with_logits(outputs.double(), targets.double(), reduction="none")
        sums = {
            "loss": losses.mean(1).sum(),
            "examples": torch.tensor(len(targets)),
            "true_positives": (predicted & true).sum(0),
            "false_positives": (predicted & ~true).sum(0),
            "false_negatives": (~predicted & true).sum(0),
        }
        return Measured(sums, {"scores": outputs.float(), "targets": targets})

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics that the class lists."""
        sums = measured.sums
        loss = float(sums["loss"]) / int(sums["examples"])
        if self.has_only_totals(measured):
            return {"loss": loss}
        positives, f1, precision = per_class(measured)
        there = positives > 0
        hits = 2 * int(sums["true_positives"].sum())
        counted = hits + int(sums["false_positives"].sum()) + int(sums["false_negatives"].sum())
        return present(
            {
                "loss": loss,
                "average_precision": float(precision[there].mean()) if there.any() else None,
                "f1_micro": hits / counted if counted else None,
                "f1_macro": float(f1[there].mean()) if there.any() else None,
            }
        )

    def condensed(self, measured: Measured) -> Measured:
        """The measurements with the scores of each class sorted on their own: no row is an image any more."""
        scores, at = measured.rows["scores"].sort(dim=0, descending=True, stable=True)
        return Measured(measured.sums, {"scores": scores, "targets": measured.rows["targets"].gather(0, at)})

    def details(self, measured: Measured, classes: Sequence[str]) -> dict[str, float]:
        """`average_precision_<class>` and `f1_<class>` for each class that has positive examples."""
        positives, f1, precision = (values.tolist() for values in per_class(measured))
        rows = [row for row in zip(classes, positives, precision, f1, strict=True) if row[1]]
        found = {f"average_precision_{name}": value for name, _, value, _ in rows}
        return found | {f"f1_{name}": value for name, _, _, value in rows}

    def predict(self, outputs: Tensor) -> dict[str, Tensor]:
        """`present`, bool [n, classes], whether a class is predicted, and `scores`, float [n, classes], probabilities.

        PyTorch's exporters trace it, and the names are those of the exported model's outputs.

        >>> MultiLabel().predict(torch.tensor([[-1.0, 0.0]]))["present"]
        tensor([[False,  True]])
        """
        scores = outputs.sigmoid()
        return {"present": scores >= THRESHOLD, "scores": scores}

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The prediction of one image as columns of predictions.csv.

        `classes` has the predicted names, separated by semicolons, the most probable first. After it come the `top`
        classes by probability, predicted or not.

        Args:
            prediction: what `predict` returned for this image, as arrays [classes].
            classes: the name of each class.

        >>> one = {"present": np.array([True, False]), "scores": np.array([0.7, 0.1])}
        >>> MultiLabel().row(one, ["cat", "dog"], top=1)
        {'classes': 'cat', 'class': 'cat', 'score': 0.7}
        """
        scores = prediction["scores"]
        order = np.argsort(-scores, kind="stable").tolist()
        columns: dict[str, Any] = {
            "classes": ";".join(classes[label] for label in order if prediction["present"][label])
        }
        for rank, label in enumerate(order[:top], 1):
            end = "" if rank == 1 else f"_{rank}"
            columns |= {f"class{end}": classes[label], f"score{end}": round(float(scores[label]), 6)}
        return columns

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: NDArray[np.uint8] | None = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]: the image, at least 224 pixels wide, above the predicted classes and the true ones.

        Args:
            image: uint8 [C, H, W].
            prediction: what `predict` returned for this image, as arrays [classes].
            target: uint8 [classes], if it is known; a predicted class is green if it is right, and red if not.
            classes: the name of each class; numbers by default.
        """
        scores = prediction["scores"]
        names = list(classes) or [str(label) for label in range(len(scores))]
        order = np.argsort(-scores, kind="stable").tolist()
        predicted = [label for label in order if prediction["present"][label]]
        lines = []
        for label in predicted[:_NAMED]:
            colour = BLACK if target is None else GREEN if target[label] else RED
            lines.append((f"{names[label]}  {100 * float(scores[label]):.1f} %", colour))
        if len(predicted) > _NAMED:
            lines.append((f"and {len(predicted) - _NAMED} more", BLACK))
        if not predicted:
            colour = BLACK if target is None else RED if target.any() else GREEN
            lines.append(("no class", colour))
        if target is not None:
            lines.append(
                (f"truth: {', '.join(names[at] for at in np.flatnonzero(target)) or 'no class'}", BLACK)
            )
        return captioned(enlarged(image), lines)

    def misfit(self, outputs: object, inputs: Tensor, classes: int) -> str | None:
        """The logits must be [n, classes]."""
        return wrong_shape(outputs, len(inputs), classes)

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> Tensor:
        """Random sets of classes, uint8 [n, classes] of 0 and 1."""
        return torch.randint(2, (n, classes), generator=generator, dtype=torch.uint8)


def per_class(measured: Measured) -> tuple[Tensor, Tensor, Tensor]:
    """(positives int64, F1 float64, average precision float64) of each class, [classes].

    The numbers of a class without positives mean nothing: F1 is 0, average precision NaN.
    """
    sums = measured.sums
    hits, missed = 2 * sums["true_positives"], sums["false_negatives"]
    counted = hits + sums["false_positives"] + missed
    f1 = hits.double() / counted.clamp(min=1)
    precision = average_precision(measured.rows["scores"], measured.rows["targets"])
    return sums["true_positives"] + missed, f1, precision


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """float64 [classes]: the average precision of each class; NaN for a class without positives.

    AP = sum_k (R_k - R_{k-1}) P_k over the different scores in descending order, where P_k and R_k are precision and
    recall of all examples with at least the k-th score. Each positive adds the precision at its own score over the
    number of positives, so equal scores count as one step, and the order of the examples does not matter.

    Args:
        scores: float [n, classes]; NaN counts as the lowest.
        targets: uint8 [n, classes].

    >>> average_precision(torch.tensor([[0.9], [0.5], [0.5]]), torch.tensor([[1], [1], [0]], dtype=torch.uint8))
    tensor([0.8333], dtype=torch.float64)
    """
    n, classes = scores.shape
    if not n:
        return torch.full((classes,), torch.nan, dtype=torch.float64)
    ordered, at = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(
        0, descending=True
    )
    true = targets.gather(0, at).long()
    places = torch.arange(n, device=scores.device)[:, None]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[:-1] != ordered[1:]
    # The place of the last example with the same score.
    ends = torch.where(last, places, n).flip(0).cummin(0).values.flip(0)
    precision = true.cumsum(0).gather(0, ends).double() / (ends + 1)
    return (precision * true).sum(0) / true.sum(0)


def multi_label(
    *,
    score: Annotated[
        Literal["average_precision", "f1_micro", "f1_macro"],
        Field(description="the metric that the best model is chosen by"),
    ] = "average_precision",
    label_smoothing: Annotated[
        float, Field(ge=0, lt=1, description="s: the targets 1 and 0 become 1 - s / 2 and s / 2 in training")
    ] = 0.0,
    class_weights: ClassWeightsSetting = "none",
) -> MultiLabel:
    """Any number of classes an image.

    Raises `ConfigError` for class weights of which none is above 0.
    """
    weights = checked(class_weights)
    return MultiLabel(score=score, label_smoothing=label_smoothing, class_weights=weights)
