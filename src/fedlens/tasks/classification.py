"""Classification: cross-entropy, accuracies and calibration."""

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
from fedlens.core.device_copies import downloaded
from fedlens.core.measured import Measured
from fedlens.tasks.class_weights import ClassWeighted, ClassWeightsSetting, checked
from fedlens.tasks.picture import BLACK, GREEN, RED, captioned, enlarged
from fedlens.tasks.task import counted, measurable, present, wrong_shape

BINS = 15  # of the calibration error (Guo et al. 2017, arXiv 1706.04599)
_CONFUSION = 1000  # classes up to which there is a confusion matrix
_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Classification(ClassWeighted):
    """One class an image. Outputs are logits [n, classes], targets int64 [n].

    Args:
        score: the metric that the best model is chosen by.
        label_smoothing: the share of the target probability that all classes divide evenly, in training.
        class_weights: weights of the classes in the training loss: "none", "balanced" (n / (C n_c) at each client,
            from its own counts n_c of C classes), or one number a class.

    Metrics:
        loss: the mean cross-entropy in nats, without weights and smoothing.
        accuracy: the share of examples whose largest logit is that of their class; `accuracy_top5`: whose logit is
            among the five largest, if there are more than five classes.
        accuracy_balanced: the mean over classes of their accuracy; a class without examples is left out.
        calibration_error: sum_b |correct_b - confidence_b| / n over 15 equal bins of the largest probability
            (Guo et al. 2017, Eq. 3).

    >>> task = Classification()
    >>> task.metrics(task.measure(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])))["accuracy"]
    0.5
    """

    score: str = "accuracy"
    label_smoothing: float = 0.0
    kind: ClassVar[Kind] = "classification"
    features: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = (
        "loss",
        "accuracy",
        "accuracy_top5",
        "accuracy_balanced",
        "calibration_error",
    )
    errors: ClassVar[frozenset[str]] = frozenset({"loss", "calibration_error"})
    shares: ClassVar[frozenset[str]] = frozenset({"accuracy", "accuracy_top5", "accuracy_balanced"})
    totals: ClassVar[frozenset[str]] = frozenset({"loss", "examples", "correct", "top5"})

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The cross-entropy in nats: its mean, or with `weights` sum_i w(y_i) l_i / sum_i w(y_i)."""
        if weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)
        losses = self._losses(outputs, targets)
        each = weights.to(losses)[targets]
        if not normalize:
            return (each * losses).mean()
        # The floor is for a batch of classes of weight 0 alone; no other sum is as small.
        return (each * losses).sum() / each.sum().clamp(min=torch.finfo(losses.dtype).tiny)

    @property
    def losses(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The cross-entropy of each example, [n]; None with class weights, whose mean has another denominator."""
        return None if self.weighs else self._losses

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=self.label_smoothing)

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """int64 [n, classes]: 1 at each example's class."""
        return F.one_hot(targets, classes)

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        """The sums of a batch.

        `loss` float64 and `examples`, `correct`, `top5` int64; `confusion` int64 [classes, classes] with the truth in
        rows and the prediction in columns, up to 1,000 classes, and beyond them `class_examples` and `class_correct`
        int64 [classes]; and for the 15 bins `bin_count`, `bin_correct` int64 [15] and `bin_confidence` float64 [15].
        """
        classes = outputs.shape[1]
        outputs, targets = measurable(outputs, targets)
        log_probabilities = F.log_softmax(outputs, 1)
        predicted = outputs.argmax(1)
        hit = predicted == targets
        confidence = (
            log_probabilities.gather(1, predicted[:, None]).squeeze(1).exp().nan_to_num_(0.0).double()
        )
        bins = (confidence * BINS).long().clamp_(0, BINS - 1)
        outcomes = counted(bins * 2 + hit, 2 * BINS).view(BINS, 2)  # wrong and right
        sums = {
            "loss": F.nll_loss(log_probabilities, targets, reduction="sum").double(),
            "examples": torch.tensor(len(targets)),
            "correct": hit.sum(),
            "bin_count": outcomes.sum(1),
            "bin_correct": outcomes[:, 1].contiguous(),
            "bin_confidence": _sums_of(confidence, bins, BINS),
        }
        if classes > _TOP:
            sums["top5"] = _ranks(outputs, targets).lt(_TOP).sum()
        if classes <= _CONFUSION:
            cells = counted(targets * classes + predicted, classes * classes)
            sums["confusion"] = cells.view(classes, classes)
        else:
            sums["class_examples"] = counted(targets, classes)
            # A wrong one falls into a cell of its own, which is left out: nothing is picked out before.
            sums["class_correct"] = counted(torch.where(hit, targets, classes), classes + 1)[:classes]
        return Measured(sums)

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics that the class lists."""
        sums = measured.sums
        n = int(sums["examples"])
        found = present(
            {
                "loss": float(sums["loss"]) / n,
                "accuracy": int(sums["correct"]) / n,
                "accuracy_top5": int(sums["top5"]) / n if "top5" in sums else None,
            }
        )
        if self.has_only_totals(measured):
            return found
        examples, correct = per_class(measured)
        there = examples > 0
        gap = (sums["bin_correct"].double() - sums["bin_confidence"]).abs().sum()
        balanced = float((correct[there].double() / examples[there]).mean())
        return {**found, "accuracy_balanced": balanced, "calibration_error": float(gap) / n}

    def condensed(self, measured: Measured) -> Measured:
        """The measurements with two numbers a class in place of the confusion matrix."""
        sums = {name: value for name, value in measured.sums.items() if name != "confusion"}
        sums["class_examples"], sums["class_correct"] = per_class(measured)
        return Measured(sums, measured.rows)

    def details(self, measured: Measured, classes: Sequence[str]) -> dict[str, float]:
        """`accuracy_<class>` for each class that has examples."""
        examples, correct = per_class(measured)
        rows = zip(classes, examples.tolist(), correct.tolist(), strict=True)
        return {f"accuracy_{name}": right / n for name, n, right in rows if n}

    def mistakes(self, outputs: Tensor, targets: Tensor, most: int) -> dict[str, Tensor]:
        """The wrong predictions with the largest probabilities.

        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
        >>> Classification().mistakes(logits, torch.tensor([0, 0, 0]), 5)["index"].tolist()
        [2, 1]
        """
        outputs = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
        predicted, confidence = outputs.argmax(1), F.log_softmax(outputs, 1).amax(1).exp().double()
        wrong = (predicted != targets) & confidence.isfinite()
        confidence = torch.where(wrong, confidence, -1.0)  # right answers come last, and are cut off
        at = confidence.argsort(descending=True, stable=True)[:most]
        rows = {"index": at, "truth": targets[at], "answer": predicted[at], "confidence": confidence[at]}
        rows = downloaded(rows)
        return {name: value[rows["confidence"] >= 0] for name, value in rows.items()}

    def confidences(self, outputs: Tensor, targets: Tensor, most: int) -> dict[str, Tensor]:
        """The probability of each label, and the most probable classes; empty if a target is no class of the outputs.

        >>> logits = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
        >>> rows = Classification().confidences(logits, torch.tensor([0, 1]), 1)
        >>> rows["classes"].tolist(), [round(value, 3) for value in rows["confidence"].tolist()]
        ([[1], [0]], [0.119, 0.5])
        """
        # A task of the user's own may inherit this and have other targets, such as -100 for no label.
        if targets.dim() != 1 or targets.is_floating_point():
            return {}
        valid = (targets >= 0) & (targets < outputs.shape[1])
        probabilities = outputs.float().softmax(1).nan_to_num_(0.0)
        scores, classes = probabilities.sort(dim=1, descending=True, stable=True)
        confidence = probabilities.gather(1, torch.where(valid, targets, 0)[:, None]).squeeze(1)
        rows = {"label": targets, "confidence": confidence}
        rows |= {"classes": classes[:, :most].contiguous(), "scores": scores[:, :most].contiguous()}
        all_valid, found = downloaded((valid.all(), rows))
        return found if all_valid else {}

    def misfit(self, outputs: object, inputs: Tensor, classes: int) -> str | None:
        """The logits must be [n, classes]."""
        return wrong_shape(outputs, len(inputs), classes)

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> Tensor:
        """Random classes, int64 [n]."""
        return torch.randint(classes, (n,), generator=generator)

    def predict(self, outputs: Tensor) -> dict[str, Tensor]:
        """`class`, int64 [n], the most probable class, and `scores`, float [n, classes], softmax probabilities.

        PyTorch's exporters trace it, and the names are those of the exported model's outputs.

        >>> Classification().predict(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))["class"]
        tensor([0, 1])
        """
        return {"class": outputs.argmax(1), "scores": outputs.softmax(1)}

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The prediction of one image as columns of predictions.csv: the `top` classes, each with its probability.

        Args:
            prediction: what `predict` returned for this image, as arrays: `class` [] and `scores` [classes].
            classes: the name of each class.

        >>> one = {"class": np.array(1), "scores": np.array([0.2, 0.5, 0.3])}
        >>> Classification().row(one, ["cat", "dog", "cow"], top=2)
        {'class': 'dog', 'score': 0.5, 'class_2': 'cow', 'score_2': 0.3}
        """
        scores, first = prediction["scores"], int(prediction["class"])
        others = [label for label in np.argsort(-scores, kind="stable").tolist() if label != first]
        columns: dict[str, Any] = {}
        for rank, label in enumerate([first, *others][:top], 1):
            end = "" if rank == 1 else f"_{rank}"
            columns |= {f"class{end}": classes[label], f"score{end}": round(float(scores[label]), 6)}
        return columns

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: int | None = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]: the image, at least 224 pixels wide, above the class, its probability, and the truth.

        Args:
            image: uint8 [C, H, W].
            prediction: what `predict` returned for this image, as arrays.
            target: the true class, if it is known; the text is green if the prediction is right, and red if not.
            classes: the name of each class; numbers by default.
        """
        label = int(prediction["class"])
        names = [classes[at] if classes else str(at) for at in (label, target) if at is not None]
        colour = BLACK if target is None else GREEN if target == label else RED
        lines = [(f"{names[0]}  {100 * float(prediction['scores'][label]):.1f} %", colour)]
        if target is not None:
            lines.append((f"truth: {names[1]}", BLACK))
        return captioned(enlarged(image), lines)


def _sums_of(values: Tensor, bins: Tensor, count: int) -> Tensor:
    """float64 [count]: the sum of the values [n] in each bin, added in a fixed order."""
    if values.device.type == "cpu":
        return torch.bincount(bins, values, minlength=count)
    # Masks, because `bincount` adds in no fixed order on a GPU.
    inside = bins[:, None] == torch.arange(count, device=bins.device)
    return torch.where(inside, values[:, None], 0.0).sum(0)


def _ranks(outputs: Tensor, targets: Tensor) -> Tensor:
    """int64 [n]: how many classes come before the target. Of equal outputs the first comes first, as in `argmax`."""
    own = outputs.gather(1, targets[:, None])
    before, ties = ~(outputs <= own), outputs == own  # NaN comes before every number
    if ties.is_cuda or int(ties.count_nonzero()) > len(targets):  # on a GPU, to look takes longer
        before |= ties & (torch.arange(outputs.shape[1], device=outputs.device) < targets[:, None])
    return before.sum(1)


def per_class(measured: Measured) -> tuple[Tensor, Tensor]:
    """(examples, correct) of each class, both int64 [classes], from the measurements of `Classification`."""
    sums = measured.sums
    if "confusion" in sums:
        return sums["confusion"].sum(1), sums["confusion"].diagonal()
    return sums["class_examples"], sums["class_correct"]


def classification(
    *,
    score: Annotated[
        Literal["accuracy", "accuracy_top5", "accuracy_balanced"],
        Field(description="the metric that the best model is chosen by"),
    ] = "accuracy",
    label_smoothing: Annotated[
        float,
        Field(ge=0, lt=1, description="share of the target probability that all classes divide evenly"),
    ] = 0.0,
    class_weights: ClassWeightsSetting = "none",
) -> Classification:
    """One class an image.

    Raises `ConfigError` for class weights of which none is above 0.
    """
    weights = checked(class_weights)
    return Classification(score=score, label_smoothing=label_smoothing, class_weights=weights)
