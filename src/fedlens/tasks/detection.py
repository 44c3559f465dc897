"""Detection: the losses that a detector gives itself, and COCO's average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo, Kind
from fedlens.core.device_copies import downloaded, uploaded
from fedlens.core.measured import Measured
from fedlens.tasks.box_average_precision import RECALLS, THRESHOLDS, Curve, best_f1, curves, matched
from fedlens.tasks.picture import boxes_drawn
from fedlens.tasks.task import Task
from fedlens.vision.box_batch import BoxBatch
from fedlens.vision.change import Change
from fedlens.vision.detector import Detector
from fedlens.vision.moved_targets import moved_boxes

KEPT = 300  # detections of an image in a prediction
_ANCHORS = 9 * 4 / 3 / 64  # of a pixel, in the detector with the most: RetinaNet on strides from 8 on

Dictionaries = list[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Detection(Task):
    """Boxes with a class. A module returns named losses in training, and boxes, labels and scores in evaluation.

    Modules are called as those of torchvision are, but for two things: images are one tensor [n, C, H, W], and classes
    are counted from 0. See `fedlens.vision.detector.Detector`. Targets are a `BoxBatch`.

    Args:
        score: the metric that the best model is chosen by.
        shown_score: the score from which pictures and tables show a detection. No metric depends on it.
        classes: the number of classes of the dataset that it is for; see `fitted`.

    Metrics, over all images together (Lin et al. 2014, arXiv 1405.0312; pycocotools `COCOeval`):
        map50: the mean over classes of the average precision at an intersection over union of 0.5.
        map: the mean of that at the thresholds 0.50, 0.55, ..., 0.95.

    Average precision is the mean over the recalls 0, 0.01, ..., 1 of the best precision at that recall or above. Of
    each image and class the 100 detections with the highest scores count. Equal scores are one step of the curve. A
    class without a true box is left out of the mean; without any true box both metrics are left out. There is no
    `loss`, because a detector gives none in evaluation mode.

    A detection with a coordinate or score that is not finite is left out of metrics and predictions; summary.json
    counts them as `detections_not_finite`.

    >>> truth = BoxBatch(torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([0]), torch.tensor([0]), 1)
    >>> found = {"boxes": torch.tensor([[0.0, 0, 10, 6]]), "labels": torch.tensor([0]), "scores": torch.tensor([0.75])}
    >>> task = Detection()
    >>> task.metrics(task.measure([found], truth))
    {'map50': 1.0, 'map': 0.3}
    """

    score: str = "map50"
    shown_score: float = 0.25
    classes: int | None = None
    kind: ClassVar[Kind] = "detection"
    takes_targets: ClassVar[bool] = True
    placed: ClassVar[bool] = True
    annotates: ClassVar[Literal["masks", "boxes"] | None] = "boxes"
    sizes: ClassVar[frozenset[str]] = frozenset({"resized"})
    one_class: ClassVar[bool] = False
    unstacked: ClassVar[str] = (
        "images have different numbers of boxes, so the losses of several clients cannot be computed together"
    )
    metric_names: ClassVar[tuple[str, ...]] = ("map", "map50")
    shares: ClassVar[frozenset[str]] = frozenset({"map", "map50"})
    errors: ClassVar[frozenset[str]] = frozenset()
    sends: ClassVar[str] = (
        "for each class the sorted scores of its detections with the thresholds at which they match a true box, and "
        "how many true boxes it has"
    )
    measures_single_examples: ClassVar[bool] = True

    def fitted(self, info: DatasetInfo) -> Detection:
        """The task with the number of classes of this dataset."""
        return replace(self, classes=len(info.classes))

    # ---- in a step

    def outputs(self, module: nn.Module, inputs: Tensor, targets: BoxBatch | None) -> Any:
        """The losses by name of a module in training mode; else one dictionary per image.

        Boxes without width or height take no part in training.
        """
        if not module.training or targets is None:
            return module(inputs)
        given = dictionaries(targets)
        plain = isinstance(module, Detector) and module.plain_targets
        return module(inputs, given if plain else uploaded(given, inputs.device))

    def loss(
        self, outputs: Any, targets: BoxBatch, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The sum of the module's losses. Class weights cannot apply to them.

        Raises `ConfigError` if the module returned no losses.
        """
        if not isinstance(outputs, Mapping) or not outputs:
            raise ConfigError(
                f"the detector returned {_named(outputs)} in training mode, not its losses by name",
                where="model",
                hint="return a dictionary of 0-dim tensors from model(images, targets), such as {'box': loss}",
            )
        return torch.stack([value.reshape(()) for value in outputs.values()]).sum()

    def counts(self, targets: BoxBatch, classes: int) -> Tensor:
        """int64 [n, classes]: the boxes of each class in each image."""
        cells = torch.bincount(targets.image * classes + targets.labels, minlength=len(targets) * classes)
        return cells.view(len(targets), classes)

    def most_counts(self, input_shape: Sequence[int]) -> float:
        """The number of pixels: no image has as many boxes."""
        return prod(input_shape[1:])

    # ---- evaluation

    def measure(self, outputs: Dictionaries, targets: BoxBatch) -> Measured:
        """The rows and sums of a batch.

        Rows, 8 bytes for each detection: `label` int16, `score` float32, and `match` int16, whose bit j says whether
        the detection has a true box at the threshold 0.5 + 0.05 j; see `fedlens.tasks.box_average_precision.matched`.
        And `true_label` int16 with `true_boxes` int64: how many true boxes of each class the batch has. Sums:
        `examples` and `not_finite` int64, images and left out detections.

        Raises `ConfigError` for a detection of a class that the dataset does not have.
        """
        boxes, labels, scores, image = joined(downloaded(outputs))
        self._refuse_labels(labels)
        finite = boxes.isfinite().all(1) & scores.isfinite()
        targets = targets.to("cpu")
        found = matched(boxes[finite], labels[finite], scores[finite], image[finite], targets)
        counts = torch.bincount(targets.labels)
        true = counts.nonzero().view(-1)
        rows = {
            "label": found[0].to(torch.int16),
            "score": found[1],
            "match": found[2],
            "true_label": true.to(torch.int16),
            "true_boxes": counts[true],
        }
        sums = {"examples": torch.tensor(len(targets)), "not_finite": (~finite).sum()}
        return Measured(sums, rows)

    def _refuse_labels(self, labels: Tensor) -> None:
        if not len(labels):
            return
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or (self.classes is not None and most >= self.classes):
            of = "classes" if self.classes is None else f"the {self.classes} classes of the dataset"
            raise ConfigError(
                f"the detector found an object of class {least if least < 0 else most}, but {of} are counted from 0",
                where="model",
                hint="return labels from 0 to the number of classes - 1 in evaluation mode",
            )

    def metrics(self, measured: Measured) -> dict[str, float]:
        """`map` and `map50`."""
        return means(per_class(measured))

    def condensed(self, measured: Measured) -> Measured:
        """The measurements sorted by class and score: no order of images is left, and no box was in them."""
        rows = {name: value.numpy() for name, value in measured.rows.items()}
        order = np.lexsort((rows["match"], -rows["score"], rows["label"]))
        counts = true_boxes(measured)
        held = np.flatnonzero(counts)
        kept = {name: rows[name][order] for name in ("label", "score", "match")}
        kept |= {"true_label": held.astype(np.int16), "true_boxes": counts[held]}
        return Measured(measured.sums, {name: torch.from_numpy(value) for name, value in kept.items()})

    def recorded(self, measured: Measured, classes: int) -> Measured:
        """The sums, and in place of the detections the curves of the classes.

        `truths` int64 [classes], the true boxes; `average_precision` float64 [classes, 10], at each threshold, and
        `precision` float64 [classes, 101], at an overlap of 0.5 and the recalls 0, 0.01, ..., 1, both 0 for a class
        without a true box; and the numbers of `best_f1`, float64, as `best_precision`, `best_recall` and so on.
        """
        counts, held = np.zeros(classes, np.int64), true_boxes(measured)
        counts[: len(held)] = held
        average, precision = np.zeros((classes, len(THRESHOLDS))), np.zeros((classes, len(RECALLS)))
        for at, one in per_class(measured).items():
            average[at], precision[at] = one.average_precision(), one.precision_at_recalls()
        rows = {name: value.numpy() for name, value in measured.rows.items()}
        best = best_f1(rows["score"], rows["match"], int(counts.sum()))
        sums = {"truths": counts, "average_precision": average, "precision": precision}
        sums |= {f"best_{name.removeprefix('best_')}": np.array(value) for name, value in best.items()}
        return Measured({**measured.sums, **{name: torch.as_tensor(value) for name, value in sums.items()}})

    def details(self, measured: Measured, classes: Sequence[str]) -> dict[str, float]:
        """AP of each class, and precision and recall of all classes together.

        `ap_<class>` and `ap50_<class>` of each class that has true boxes; `precision`, `recall` and `f1` at the score
        with the largest F1 and an overlap of 0.5, and that score as `best_score`; see
        `fedlens.tasks.box_average_precision.best_f1`; and `detections_not_finite`, if there are any.
        """
        sums = (self.recorded(measured, len(classes)) if measured.rows else measured).sums
        held = sums["truths"].nonzero().view(-1).tolist()
        values = {f"ap_{classes[at]}": float(sums["average_precision"][at].mean()) for at in held}
        values |= {f"ap50_{classes[at]}": float(sums["average_precision"][at, 0]) for at in held}
        for name in ("precision", "recall", "f1", "best_score"):
            key = f"best_{name.removeprefix('best_')}"
            values |= {name: float(sums[key])} if key in sums else {}
        left_out = int(measured.sums["not_finite"])
        return values | ({"detections_not_finite": left_out} if left_out else {})

    def restored(self, outputs: Dictionaries, size: tuple[int, int], stored: tuple[int, int]) -> Dictionaries:
        """The detections with their boxes in pixels of the stored images, in place of those of images of `size`."""
        x, y = stored[1] / size[1], stored[0] / size[0]
        return [{**one, "boxes": one["boxes"] * one["boxes"].new_tensor([x, y, x, y])} for one in outputs]

    def output_values(self, info: DatasetInfo) -> int:
        """The numbers that a detector with many anchors computes for an image, before suppression."""
        return round(_ANCHORS * prod(info.input_shape[1:])) * (len(info.classes) + 4)

    # ---- outside of training

    def predict(self, outputs: Dictionaries) -> dict[str, Tensor]:
        """The 300 detections of each image with the highest scores, in descending order.

        `boxes` float32 [n, 300, 4], `labels` int64 [n, 300] and `scores` float32 [n, 300]. Where an image has fewer,
        boxes and scores are 0 and labels -1.

        >>> found = {"boxes": torch.ones(1, 4), "labels": torch.tensor([2]), "scores": torch.tensor([0.5])}
        >>> Detection().predict([found])["labels"][0, :3].tolist()
        [2, -1, -1]
        """
        n, outputs = len(outputs), downloaded(outputs)
        boxes, labels, scores = torch.zeros(n, KEPT, 4), torch.full((n, KEPT), -1), torch.zeros(n, KEPT)
        for at, one in enumerate(outputs):
            finite = one["boxes"].isfinite().all(1) & one["scores"].isfinite()
            own = {name: one[name][finite] for name in ("boxes", "labels", "scores")}
            best = own["scores"].float().argsort(descending=True, stable=True)[:KEPT]
            boxes[at, : len(best)] = own["boxes"][best].float()
            labels[at, : len(best)] = own["labels"][best]
            scores[at, : len(best)] = own["scores"][best].float()
        return {"boxes": boxes, "labels": labels, "scores": scores}

    def graph(self, module: nn.Module, inputs: Tensor) -> Mapping[str, Tensor]:
        """What `raw` of the detector returns: its outputs before boxes are decoded and suppressed.

        Raises `ConfigError` for a module that does not inherit from `fedlens.vision.detector.Detector`.
        """
        if isinstance(module, Detector):
            return module.raw(inputs)
        raise ConfigError(
            f"the model {type(module).__name__} has no `raw`, the outputs before boxes are decoded, so it has no graph",
            where="model",
            hint="export it as safetensors, or inherit from fedlens.vision.detector.Detector and define `raw`",
        )

    def showing(self, score: float) -> Detection:
        """The task with this `shown_score`."""
        return replace(self, shown_score=score)

    def move(self, targets: BoxBatch, change: Change) -> BoxBatch:
        """The boxes of the changed images; see `fedlens.vision.moved_targets.moved_boxes`."""
        return moved_boxes(targets, change)

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The detections of one image as columns of predictions.csv.

        `objects` counts those with a score of at least `shown_score`. The `top` with the highest scores follow, each as
        `class`, `score` and `box`, left, top, right and bottom in pixels; they are empty if the image has fewer.

        Args:
            prediction: what `predict` returned for this image, as arrays [300, ...].
            classes: the name of each class.

        >>> boxes = torch.tensor([[1.0, 2, 3, 4]])
        >>> found = {"boxes": boxes, "labels": torch.tensor([0]), "scores": torch.tensor([0.5])}
        >>> one = {name: value[0].numpy() for name, value in Detection().predict([found]).items()}
        >>> Detection().row(one, ["cat"], top=1)
        {'objects': 1, 'class': 'cat', 'score': 0.5, 'box': '1.0 2.0 3.0 4.0'}
        """
        columns: dict[str, Any] = {"objects": len(self._shown(prediction))}
        for rank in range(top):
            label = int(prediction["labels"][rank]) if rank < len(prediction["labels"]) else -1
            end = "" if rank == 0 else f"_{rank + 1}"
            if label < 0:
                columns |= {f"class{end}": None, f"score{end}": None, f"box{end}": None}
                continue
            box = " ".join(f"{edge:.1f}" for edge in prediction["boxes"][rank].tolist())
            score = round(float(prediction["scores"][rank]), 6)
            columns |= {f"class{end}": classes[label], f"score{end}": score, f"box{end}": box}
        return columns

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: Mapping[str, Any] | BoxBatch | None = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [H, W, 3]: the image with the detections of at least `shown_score`, above how many each class has.

        Args:
            image: uint8 [C, H, W].
            prediction: what `predict` returned for this image, as arrays [300, ...].
            target: its true boxes, if they are known, as a `BoxBatch` of one image, or as a dictionary of `boxes`
                [k, 4] and `labels` [k]. They are drawn dashed.
            classes: the name of each class; numbers by default.
        """
        if isinstance(target, BoxBatch):
            target = {"boxes": target.boxes.cpu().numpy(), "labels": target.labels.cpu().numpy()}
        shown = self._shown(prediction)
        return boxes_drawn(
            image,
            prediction["boxes"][shown],
            prediction["labels"][shown],
            prediction["scores"][shown],
            None if target is None else (np.asarray(target["boxes"]), np.asarray(target["labels"])),
            classes,
        )

    def _shown(self, prediction: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """The places of the detections that are shown."""
        return np.flatnonzero((prediction["labels"] >= 0) & (prediction["scores"] >= self.shown_score))

    def misfit(self, outputs: object, inputs: Tensor, classes: int) -> str | None:
        """A list with a dictionary of boxes, labels and scores for each image."""
        answers = outputs if isinstance(outputs, list | tuple) else ()
        if len(answers) == len(inputs) and all(_fits(one, classes) for one in answers):
            return None
        return (
            "a list with one dictionary for each image in evaluation mode: boxes [k, 4], labels int64 [k] from 0 to "
            f"{classes - 1}, and scores [k]"
        )

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> BoxBatch:
        """Two boxes an image, of half its width and height."""
        _, height, width = input_shape
        size = torch.tensor([width, height])
        corners = torch.rand(2 * n, 2, generator=generator) * size / 2
        boxes = torch.cat([corners, corners + size / 2], 1)
        labels = torch.randint(classes, (2 * n,), generator=generator)
        return BoxBatch(boxes, labels, torch.arange(n).repeat_interleave(2), n)


def dictionaries(targets: BoxBatch) -> Dictionaries:
    """The targets as a detector takes them: `boxes` float32 [k, 4] and `labels` int64 [k] of each image.

    Boxes without width or height are left out.

    >>> two = BoxBatch(torch.tensor([[0.0, 0, 4, 4], [1, 1, 1, 2]]), torch.tensor([3, 5]), torch.tensor([0, 1]), 2)
    >>> [one["labels"].tolist() for one in dictionaries(two)]
    [[3], []]
    """
    good = (targets.boxes[:, 2:] > targets.boxes[:, :2]).all(1)
    boxes, labels, image = targets.boxes[good], targets.labels[good], targets.image[good]
    counts = torch.bincount(image, minlength=len(targets)).tolist()
    return [
        {"boxes": own, "labels": classes}
        for own, classes in zip(torch.split(boxes, counts), torch.split(labels, counts), strict=True)
    ]


def joined(outputs: Dictionaries) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The boxes [m, 4], labels [m], scores [m] and images int64 [m] of the detections of all images."""
    image = torch.arange(len(outputs)).repeat_interleave(
        torch.tensor([len(one["scores"]) for one in outputs])
    )
    boxes, labels, scores = (
        torch.cat([one[name] for one in outputs]) for name in ("boxes", "labels", "scores")
    )
    return boxes, labels, scores, image.to(boxes.device)


def true_boxes(measured: Measured) -> NDArray[np.int64]:
    """int64 [classes]: the number of true boxes of each class, up to the last class that occurs."""
    labels, counts = measured.rows["true_label"].long(), measured.rows["true_boxes"]
    labels = torch.cat([labels, measured.rows["label"].long()])
    added = torch.zeros(int(labels.max()) + 1 if len(labels) else 0, dtype=torch.int64)
    added.index_add_(0, measured.rows["true_label"].long(), counts)
    found: NDArray[np.int64] = added.numpy()
    return found


def per_class(measured: Measured) -> dict[int, Curve]:
    """The precision-recall curve of each class that has a true box, by class."""
    rows = measured.rows
    labels, scores, bits = rows["label"].long().numpy(), rows["score"].numpy(), rows["match"].numpy()
    return curves(labels, scores, bits, true_boxes(measured))


def means(found: Mapping[int, Curve]) -> dict[str, float]:
    """`map` and `map50`: the means over the classes; nothing without a class."""
    if not found:
        return {}
    each = np.stack([one.average_precision() for one in found.values()])
    return {"map50": float(each[:, 0].mean()), "map": float(each.mean(axis=1).mean())}


def _named(outputs: object) -> str:
    return "an empty dictionary" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"


def _fits(one: object, classes: int) -> bool:
    """Whether this is the answer for an image."""
    if not isinstance(one, Mapping) or not {"boxes", "labels", "scores"} <= one.keys():
        return False
    boxes, labels, scores = one["boxes"], one["labels"], one["scores"]
    if not all(isinstance(part, Tensor) for part in (boxes, labels, scores)):
        return False
    shapes = tuple(boxes.shape), tuple(labels.shape), tuple(scores.shape)
    k = len(scores) if scores.dim() else -1
    if shapes != ((k, 4), (k,), (k,)) or labels.is_floating_point():
        return False
    return not k or (int(labels.min()) >= 0 and int(labels.max()) < classes)


def detection(
    *,
    score: Annotated[
        Literal["map50", "map"], Field(description="the metric that the best model is chosen by")
    ] = "map50",
    shown_score: Annotated[
        float, Field(ge=0, le=1, description="the score from which pictures and tables show a detection")
    ] = 0.25,
) -> Detection:
    """Boxes with a class in each image."""
    return Detection(score=score, shown_score=shown_score)
