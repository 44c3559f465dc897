"""Semantic segmentation: cross-entropy and soft Dice of pixels, and intersection over union."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedlens.base.errors import ConfigError, DataError
from fedlens.core.dataset_info import VOID, DatasetInfo, Kind
from fedlens.core.measured import Measured
from fedlens.tasks.class_weights import ClassWeighted, ClassWeightsSetting, checked
from fedlens.tasks.picture import mask_picture
from fedlens.tasks.task import counted, measurable, present
from fedlens.vision.change import Change
from fedlens.vision.moved_targets import moved_masks

_MOST_CLASSES = VOID  # ids 0 to 254
_UNMARKED = 0.9  # share of the pixels of random targets that have a class


@dataclass(frozen=True, kw_only=True)
class Segmentation(ClassWeighted):
    """One class a pixel. Outputs are logits [n, classes, H, W], targets uint8 [n, H, W], 255 for a pixel without one.

    Pixels without a class (void) count for nothing: neither in the loss nor in a metric.

    Args:
        score: the metric that the best model is chosen by.
        dice: the factor of the soft Dice loss that is added to the cross-entropy; see `loss`.
        class_weights: weights of the classes in the training loss: "none", "balanced" (m / (C m_c) at each client,
            from its own m labelled pixels, m_c of them of class c, and C classes), or one number a class.

    Metrics, over the labelled pixels of all images together, with n_ij pixels of class i that are predicted as j,
    t_i = sum_j n_ij and the union u_i = t_i + sum_j n_ji - n_ii (Long et al. 2015, arXiv 1411.4038, section 5):
        loss: the mean cross-entropy of a pixel in nats, without weights and Dice.
        mean_iou: the mean over classes of the intersection over union n_ii / u_i, as the macro average of
            `sklearn.metrics.jaccard_score`. A class in neither truth nor prediction (u_i = 0) is left out.
        accuracy: sum_i n_ii / sum_i t_i, the share of pixels that are right.
        accuracy_balanced: the mean of n_ii / t_i over the classes that have a true pixel.
        frequency_iou: sum_i t_i n_ii / u_i / sum_i t_i, the mean weighted by how frequent the classes are.

    Images without a labelled pixel define no metric.

    >>> task = Segmentation()
    >>> logits = torch.tensor([[2.0, -1.0], [0.0, 1.0]]).view(1, 2, 1, 2)  # class 0, then class 1
    >>> found = task.metrics(task.measure(logits, torch.tensor([[[0, 0]]], dtype=torch.uint8)))
    >>> found["accuracy"], found["mean_iou"], found["frequency_iou"]
    (0.5, 0.25, 0.5)
    """

    score: str = "mean_iou"
    dice: float = 0.0
    kind: ClassVar[Kind] = "segmentation"
    metric_names: ClassVar[tuple[str, ...]] = (
        "loss",
        "mean_iou",
        "accuracy",
        "accuracy_balanced",
        "frequency_iou",
    )
    shares: ClassVar[frozenset[str]] = frozenset(metric_names) - {"loss"}
    totals: ClassVar[frozenset[str]] = frozenset({"loss", "pixels"})
    placed: ClassVar[bool] = True
    annotates: ClassVar[Literal["masks", "boxes"] | None] = "masks"
    absence: ClassVar[str] = "its IoU is left out of means, or 0 if it is predicted"
    sizes: ClassVar[frozenset[str]] = frozenset({"resized", "windows"})
    sends: ClassVar[str] = (
        "its summed loss, and for each class how many pixels have it, are predicted as it, and are right"
    )

    def validate(self, info: DatasetInfo) -> None:
        """Refuses datasets of another kind or of more than 255 classes, and class weights of another number."""
        super().validate(info)
        if len(info.classes) > _MOST_CLASSES:
            raise ConfigError(
                f"the dataset has {len(info.classes)} classes, but a mask has room for {_MOST_CLASSES}",
                where="data.dataset",
                hint=f"join classes: id {VOID} marks pixels without a class",
            )

    # ---- in a step

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The cross-entropy of the labelled pixels i of the batch, with class y_i, in nats:

            CE = sum_i w(y_i) l_i / sum_i w(y_i)                  (normalize = false: / the number of pixels i)

        With w = 1 this is the mean, what `F.cross_entropy(..., ignore_index=255)` returns, to the bit. With `dice` the
        soft Dice loss times `dice` is added (Drozdzal et al. 2016, arXiv 1608.04117, Eq. 1, for several classes):

            Dice = 1 - 1/|K| sum_{c in K} 2 sum_i w(y_i) p_ic [y_i = c] / sum_i w(y_i) (p_ic + [y_i = c])

        p_ic is the softmax probability of class c, the sums run over the labelled pixels of the whole batch, and K are
        the classes with a labelled pixel of weight above 0 in the batch. A batch without a labelled pixel, or of
        weights 0, has loss 0 and gradient 0.

        Args:
            outputs: logits [n, classes, H, W].
            targets: uint8 [n, H, W].
            weights: float [classes], w.
            normalize: whether the denominator is the sum of the weights.

        >>> logits, void = torch.zeros(1, 2, 1, 1, requires_grad=True), torch.full((1, 1, 1), 255)
        >>> float(Segmentation(dice=1.0).loss(logits, void).detach())
        0.0
        """
        targets = targets.long()  # what PyTorch's loss of pixels takes
        labelled = targets != VOID
        if weights is None:
            loss = _summed(outputs, targets) / labelled.sum().clamp(min=1)
        else:
            weights = weights.to(outputs)
            each = torch.where(labelled, weights[torch.where(labelled, targets, 0)], 0.0)
            # The floor is for pixels of weight 0 alone; no other sum is as small.
            floor = torch.finfo(outputs.dtype).tiny
            total = _summed(outputs, targets, weights)
            loss = total / (each.sum().clamp(min=floor) if normalize else labelled.sum().clamp(min=1))
        if not self.dice:
            return loss
        return loss + self.dice * _dice(outputs, targets, labelled.to(outputs) if weights is None else each)

    def counts(self, targets: Tensor, classes: int) -> Tensor:
        """int64 [n, classes]: how many pixels of each example have each class; those without a class are left out."""
        n = len(targets)
        if n and targets.device.type == "cpu":
            # One by one, because bytes are counted a hundred times faster than the int64 of all masks together.
            pixels = torch.stack([torch.bincount(mask.reshape(-1), minlength=VOID + 1) for mask in targets])
        else:
            rows = torch.arange(n, device=targets.device)[:, None] * (VOID + 1)
            cells = counted((targets.flatten(1).long() + rows).flatten(), n * (VOID + 1))
            pixels = cells.view(n, VOID + 1)
        _refuse_beyond(pixels.sum(0), classes)
        return pixels[:, :classes]

    def most_counts(self, input_shape: Sequence[int]) -> float:
        """The number of pixels of an image, H W."""
        return prod(input_shape[-2:])

    # ---- evaluation

    def measure(self, outputs: Tensor, targets: Tensor) -> Measured:
        """The sums of a batch over its labelled pixels.

        `loss` float64; `pixels` int64; and `confusion` int64 [classes, classes], with the truth in rows and the
        prediction in columns. Of equal logits the first is the prediction.

        Raises `DataError` if a pixel has an id that is neither a class nor 255.
        """
        classes = outputs.shape[1]
        outputs, targets = measurable(outputs, targets)
        true = targets.long()
        # Void is row 255, so that nothing has to be picked out before. An id beyond the classes shows in its row.
        cells = counted((true * classes + _classes(outputs)).flatten(), (VOID + 1) * classes)
        cells = cells.view(VOID + 1, classes)
        _refuse_beyond(cells.sum(1), classes)
        confusion = cells[:classes]
        losses = F.cross_entropy(outputs, true, ignore_index=VOID, reduction="none")
        sums = {"loss": losses.sum(dtype=torch.float64), "pixels": confusion.sum(), "confusion": confusion}
        return Measured(sums)

    def metrics(self, measured: Measured) -> dict[str, float]:
        """The metrics that the class lists; none without a labelled pixel."""
        pixels = int(measured.sums["pixels"])
        if not pixels:
            return {}
        loss = float(measured.sums["loss"]) / pixels
        if self.has_only_totals(measured):
            return {"loss": loss}
        true, predicted, right = (counts.double() for counts in per_class(measured))
        union = true + predicted - right
        there, occurs = union > 0, true > 0
        iou = right[there] / union[there]
        return {
            "loss": loss,
            "mean_iou": float(iou.mean()),
            "accuracy": int(right.sum()) / pixels,
            "accuracy_balanced": float((right[occurs] / true[occurs]).mean()),
            "frequency_iou": float((true[there] * iou).sum()) / pixels,
        }

    def condensed(self, measured: Measured) -> Measured:
        """The measurements with three numbers a class in place of the confusion matrix."""
        sums = {name: value for name, value in measured.sums.items() if name != "confusion"}
        sums |= dict(zip(_PER_CLASS, per_class(measured), strict=True))
        return Measured(sums)

    def details(self, measured: Measured, classes: Sequence[str]) -> dict[str, float]:
        """`iou_<class>` for each class that is in the truth or predicted."""
        rows = zip(classes, *(counts.tolist() for counts in per_class(measured)), strict=True)
        unions = [(name, right, true + predicted - right) for name, true, predicted, right in rows]
        return present({f"iou_{name}": right / union if union else None for name, right, union in unions})

    def output_values(self, info: DatasetInfo) -> int:
        """The logits of an image, classes H W."""
        return len(info.classes) * prod(info.input_shape[-2:])

    def misfit(self, outputs: object, inputs: Tensor, classes: int) -> str | None:
        """The logits must be [n, classes, H, W], of the size of the images."""
        n, size = len(inputs), list(inputs.shape[-2:])
        if not (isinstance(outputs, Tensor) and outputs.dim() == 4 and outputs.shape[:2] == (n, classes)):
            return f"[{n}, {classes}, H, W]: one number a class for each pixel of the image"
        if list(outputs.shape[-2:]) != size:
            return f"{[n, classes, *size]}, the size of the images: resize the logits in `forward`"
        return None

    def random_targets(
        self, n: int, classes: int, input_shape: Sequence[int], generator: torch.Generator
    ) -> Tensor:
        """Random masks, uint8 [n, H, W], about a tenth of their pixels void."""
        size = (n, *input_shape[-2:])
        masks = torch.randint(classes, size, generator=generator, dtype=torch.uint8)
        void = torch.rand(masks.shape, generator=generator) > _UNMARKED
        return masks.masked_fill_(void, VOID)

    # ---- outside of training

    def restored(self, outputs: Tensor, size: tuple[int, int], stored: tuple[int, int]) -> Tensor:
        """The logits for images of `size`, resized bilinearly to the `stored` size, (H, W) in pixels."""
        return F.interpolate(outputs, stored, mode="bilinear", align_corners=False)

    def predict(self, outputs: Tensor) -> dict[str, Tensor]:
        """`class`, uint8 [n, H, W], the most probable class, and `confidence`, float [n, H, W], its probability.

        PyTorch's exporters trace it, and the names are those of the exported model's outputs.

        >>> Segmentation().predict(torch.tensor([[0.0, 3.0], [1.0, 2.0]]).view(1, 2, 1, 2))["class"].tolist()
        [[[1, 0]]]
        """
        return {"class": _classes(outputs).to(torch.uint8), "confidence": outputs.softmax(1).amax(1)}

    def row(
        self, prediction: Mapping[str, NDArray[Any]], classes: Sequence[str], top: int = 5
    ) -> dict[str, Any]:
        """The prediction of one image as columns of predictions.csv: the `top` classes by their share of the pixels.

        Args:
            prediction: what `predict` returned for this image, as arrays: `class` [H, W].
            classes: the name of each class.

        >>> Segmentation().row({"class": np.array([[1, 1], [1, 0]])}, ["road", "sky", "car"], top=2)
        {'class': 'sky', 'share': 0.75, 'class_2': 'road', 'share_2': 0.25}
        """
        mask = prediction["class"]
        pixels = np.bincount(mask.ravel(), minlength=len(classes))
        columns: dict[str, Any] = {}
        for rank, label in enumerate(np.argsort(-pixels, kind="stable")[:top].tolist(), 1):
            end = "" if rank == 1 else f"_{rank}"
            share = round(int(pixels[label]) / mask.size, 6)
            columns |= {f"class{end}": classes[label], f"share{end}": share}
        return columns

    def move(self, targets: Tensor, change: Change) -> Tensor:
        """The masks of the changed images; see `fedlens.vision.moved_targets.moved_masks`."""
        return moved_masks(targets, change)

    def draw(
        self,
        image: NDArray[np.uint8],
        prediction: Mapping[str, NDArray[Any]],
        target: NDArray[np.uint8] | None = None,
        classes: Sequence[str] = (),
    ) -> NDArray[np.uint8]:
        """uint8 [h, w, 3]: the image below the predicted classes in colour, and beside it below the true ones.

        Args:
            image: uint8 [C, H, W].
            prediction: what `predict` returned for this image, as arrays: `class` [H, W].
            target: uint8 [H, W], if it is known; pixels without a class have no colour.
            classes: the name of each class; numbers by default.
        """
        masks = {"predicted": prediction["class"]}
        if target is not None:
            masks["truth"] = target
        return mask_picture(image, masks, classes)


_PER_CLASS = ("class_pixels", "class_predicted", "class_right")


def per_class(measured: Measured) -> tuple[Tensor, Tensor, Tensor]:
    """(true, predicted, right) pixels of each class, int64 [classes], from the measurements of `Segmentation`."""
    sums = measured.sums
    if "confusion" in sums:
        return sums["confusion"].sum(1), sums["confusion"].sum(0), sums["confusion"].diagonal()
    true, predicted, right = (sums[name] for name in _PER_CLASS)
    return true, predicted, right


def _classes(outputs: Tensor) -> Tensor:
    """int64 [n, H, W]: the class with the largest logit, of equal ones the first.

    `max` and not `argmax`, which takes four times as long over the second dimension on a processor.
    """
    return outputs.max(1).indices


def _summed(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of the cross-entropy over the labelled pixels, each times the weight of its class.

    PyTorch's own sum over pixels is faster, but on a GPU it adds in no fixed order.
    """
    if outputs.device.type == "cpu":
        return F.cross_entropy(outputs, targets, weights, ignore_index=VOID, reduction="sum")
    return F.cross_entropy(outputs, targets, weights, ignore_index=VOID, reduction="none").sum()


def _dice(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The soft Dice loss; `weights` [n, H, W] is 0 where a pixel has no class. See `Segmentation.loss`."""
    classes = outputs.shape[1]
    inside = torch.where(targets == VOID, 0, targets)
    true = F.one_hot(inside, classes).movedim(-1, 1) * weights[:, None]
    probabilities = outputs.softmax(1)
    sizes = true.sum((0, 2, 3))
    both = (probabilities * true).sum((0, 2, 3))
    sums = (probabilities * weights[:, None]).sum((0, 2, 3)) + sizes
    counted = sizes > 0
    ratios = torch.where(counted, 2 * both / torch.where(counted, sums, 1.0), 0.0)
    number = counted.sum()
    # Without a counted class the loss is 0, and not 1.
    return (number - ratios.sum()) / number.clamp(min=1)


def _refuse_beyond(pixels: Tensor, classes: int) -> None:
    """Raises `DataError` if ids between the classes and void have pixels; `pixels` is int64 [256]."""
    beyond = pixels[classes:VOID]
    if beyond.any():
        at = int(beyond.nonzero()[0])
        raise DataError(
            f"{int(beyond[at])} pixels of a mask have the id {classes + at}, but the dataset has {classes} classes, "
            "numbered from 0",
            hint=f"write the masks with ids below {classes}, and {VOID} for pixels without a class",
        )


def segmentation(
    *,
    score: Annotated[
        Literal["mean_iou", "accuracy", "accuracy_balanced", "frequency_iou"],
        Field(description="the metric that the best model is chosen by"),
    ] = "mean_iou",
    dice: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="factor of the soft Dice loss that is added to the cross-entropy",
        ),
    ] = 0.0,
    class_weights: ClassWeightsSetting = "none",
) -> Segmentation:
    """One class a pixel.

    Raises `ConfigError` for class weights of which none is above 0.
    """
    return Segmentation(score=score, dice=dice, class_weights=checked(class_weights))
