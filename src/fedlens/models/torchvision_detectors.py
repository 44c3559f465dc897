"""Detectors of torchvision (BSD-3), called as fedlens calls them, and adapted from any of its objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import detection
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD

from fedlens.base.errors import ConfigError
from fedlens.models.backbone import WithBackbone
from fedlens.models.mobilenet_names import mobilenet_v3_leaf
from fedlens.vision.detector import Detector, NoRaw

_BACKGROUND = 3  # anchors of an image without a box that SSD trains as background, as many as for one box
_MOBILENET_V3 = "mobilenetv3_large_100"
_DIVIDED = 13  # the block of MobileNetV3 behind whose expansion SSDLite's first head looks at the features
_RATE = "only boxes with a score above this are given"

ScoreThreshold = Annotated[float, Field(ge=0, le=1, description=_RATE)]
SuppressionIou = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="of two boxes of one class that overlap by more than this, the better one is kept",
    ),
]
Detections = Annotated[int, Field(ge=1, le=10_000, description="the most boxes that are given for an image")]

Images = list[dict[str, Tensor]]


class TorchvisionDetector(WithBackbone, Detector):
    """A detector of torchvision as `net`, which takes images as they are stored and counts classes from 0.

    torchvision resizes and normalizes images inside its detectors. Here both are off: an image keeps its size, and is
    normalized as the dataset is. It is only padded with zeros where the detector needs a multiple of 32. torchvision
    counts classes from 1, because 0 is the background; RetinaNet and FCOS have no background, and leave 0 unused if
    they were made with `classes + 1`.

    Args:
        net: a `FasterRCNN`, `SSD`, `RetinaNet` or `FCOS` of torchvision; it becomes part of this module.
        classes: the number of classes, without the background.

    Raises `ConfigError` if the network has another number of classes, or also predicts masks or keypoints.
    """

    backbone: ClassVar[str] = "net.backbone"

    def __init__(self, net: Any, classes: int) -> None:
        super().__init__()
        self.net: Any = net
        self.shift = self._shift(classes)
        if self.backbone not in dict(self.named_modules()):  # of a user's own
            self.backbone = "net.backbone"  # type: ignore[misc]
        before: Any = net.transform
        net.transform = AsStored(before.size_divisible)

    def backbone_leaf(self, name: str) -> str | None:
        """timm's names of MobileNetV3 in torchvision's words; both have the same names of a ResNet."""
        if self.body != _MOBILENET_V3:
            return name
        leaf = mobilenet_v3_leaf(name)
        return None if leaf is None else self._placed(leaf.removeprefix("features."))

    def _placed(self, leaf: str) -> str:
        """The name in the backbone of a leaf of torchvision's features of MobileNetV3."""
        return leaf

    @property
    def _outputs(self) -> int:
        """How many classes the network tells apart, with a background if it has one."""
        raise NotImplementedError

    _free_of_background: ClassVar[bool] = False

    def _shift(self, classes: int) -> int:
        if self._outputs == classes + 1:
            return 1
        if self._outputs == classes and self._free_of_background:
            return 0
        raise ConfigError(
            f"the {type(self.net).__name__} was made with num_classes = {self._outputs}, but the dataset has {classes} "
            "classes, and torchvision counts the background as one more",
            where="model",
            hint=f"set num_classes = {classes + 1}",
        )

    def forward(self, images: Tensor, targets: Images | None = None) -> Any:
        """The losses by name in training mode; else a dictionary of boxes, labels and scores for each image."""
        if self.training:
            return self.net(images, [self._shifted(one) for one in targets or []])
        answers: Images = self.net(images)
        return [self._counted_from_0(one) for one in answers]

    def _shifted(self, target: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"boxes": target["boxes"], "labels": target["labels"] + self.shift}

    def _counted_from_0(self, answer: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.shift:
            return answer
        # RetinaNet may predict the class that it has for the background. A mask would be counted three times.
        (known,) = (answer["labels"] > 0).nonzero(as_tuple=True)
        return {
            "boxes": answer["boxes"][known],
            "labels": answer["labels"][known] - self.shift,
            "scores": answer["scores"][known],
        }

    def _features(self, images: Tensor) -> list[Tensor]:
        """The feature maps of normalized images."""
        features = self.net.backbone(self.net.transform(images)[0].tensors)
        return [features] if isinstance(features, Tensor) else list(features.values())

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs of the network's head for each of A anchors.

        `bbox_regression` [n, A, 4], `cls_logits` [n, A, num_classes], and of FCOS `bbox_ctrness` [n, A, 1].
        """
        found: dict[str, Tensor] = self.net.head(self._features(images))
        return found


class TwoStageDetector(TorchvisionDetector):
    """A Faster R-CNN."""

    backbone = "net.backbone.body"
    heads = ("net.roi_heads.box_predictor",)

    def __init__(self, net: GeneralizedRCNN, classes: int) -> None:
        if net.roi_heads.has_mask() or net.roi_heads.has_keypoint():
            raise ConfigError(
                f"the {type(net).__name__} also predicts masks or keypoints, which a dataset of boxes has not",
                where="model",
                hint="use a FasterRCNN",
            )
        super().__init__(net, classes)

    @property
    def _outputs(self) -> int:
        return int(self.net.roi_heads.box_predictor.cls_score.out_features)

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """Raises `NoRaw`: the second stage looks at the boxes that the first one proposes."""
        raise NoRaw(
            "the second stage of a Faster R-CNN depends on the boxes that the first stage proposes, so it has no graph",
            where="model.name",
            hint="export it as safetensors",
        )


class SsdDetector(TorchvisionDetector):
    """An SSD, whose images without a box train on background: torchvision's loss takes no anchor of them."""

    backbone = "net.backbone.features"
    heads = ("net.head.classification_head",)

    def __init__(self, net: SSD, classes: int) -> None:
        super().__init__(net, classes)
        if type(net) is SSD:
            net.__class__ = SsdWithBackground

    @property
    def _outputs(self) -> int:
        return int(self.net.head.classification_head.num_columns)

    def _placed(self, leaf: str) -> str:
        """torchvision divides the features behind the expansion of block 13, where the first head looks at them."""
        number, _, rest = leaf.partition(".")
        if int(number) < _DIVIDED:
            return f"0.{leaf}"
        if int(number) > _DIVIDED:
            return f"1.{int(number) - _DIVIDED}.{rest}"
        layer = rest.removeprefix("block.")
        return f"0.{number}.{layer.removeprefix('0.')}" if layer.startswith("0.") else f"1.0.{layer}"


class DenseDetector(TorchvisionDetector):
    """A RetinaNet or an FCOS."""

    backbone = "net.backbone.body"
    heads = ("net.head.classification_head.cls_logits",)
    _free_of_background = True

    @property
    def _outputs(self) -> int:
        return int(self.net.head.classification_head.num_classes)


class SsdWithBackground(SSD):  # type: ignore[misc]
    """torchvision's SSD, in which an image without a box is an example of background.

    Its loss takes three anchors of background for each anchor of a box (Liu et al. 2016, arXiv 1512.02325, section
    2.2), so none of an image without boxes. Here it takes the three worst of those. Other images are not affected.
    """

    def compute_loss(
        self,
        targets: Images,
        head_outputs: dict[str, Tensor],
        anchors: list[Tensor],
        matched_idxs: list[Tensor],
    ) -> dict[str, Tensor]:
        """The losses `bbox_regression` and `classification`, over the number of matched anchors, at least 1."""
        losses: dict[str, Tensor] = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        empty = [at for at, one in enumerate(targets) if not len(one["boxes"])]
        if empty:
            logits = torch.stack([head_outputs["cls_logits"][at] for at in empty])
            wrong = F.cross_entropy(
                logits.flatten(0, 1),
                logits.new_zeros(logits.shape[:2], dtype=torch.int64).flatten(),
                reduction="none",
            )
            worst = wrong.view(logits.shape[:2]).topk(min(_BACKGROUND, logits.shape[1]), dim=1).values
            matched = torch.stack([(one >= 0).sum() for one in matched_idxs]).sum()
            losses["classification"] = losses["classification"] + worst.sum() / matched.clamp(min=1)
        return losses


class AsStored(nn.Module):
    """In place of torchvision's resizing and normalizing: a batch of images of one size, padded at most.

    Args:
        multiple: height and width are padded with zeros, right and below, to multiples of this.
    """

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple

    def forward(self, images: Tensor, targets: Images | None = None) -> tuple[ImageList, Images | None]:
        """The images [n, C, H, W] as torchvision's detectors take them, and the targets as they are."""
        height, width = images.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        padded = F.pad(images, (0, right, 0, below)) if below or right else images
        return ImageList(padded, [(height, width)] * len(images)), targets

    def postprocess(self, result: Images, image_shapes: Any, original_image_sizes: Any) -> Images:
        """The boxes as they are."""
        return result


_FAMILIES: tuple[tuple[type[nn.Module], type[TorchvisionDetector]], ...] = (
    (GeneralizedRCNN, TwoStageDetector),
    (SSD, SsdDetector),
    (RetinaNet, DenseDetector),
    (FCOS, DenseDetector),
)


def adapted(net: nn.Module, classes: int) -> TorchvisionDetector:
    """A detector of torchvision as fedlens calls it; see `TorchvisionDetector`.

    `model = ...` of an experiment does this to a detector of torchvision, and to what a function makes, by itself.

    Args:
        net: a `FasterRCNN`, `SSD`, `RetinaNet` or `FCOS`; it becomes part of the result.
        classes: the number of classes, without the background.

    Raises `ConfigError` for another number of classes, and for detectors of another kind.

    >>> net = detection.ssdlite320_mobilenet_v3_large(weights_backbone=None, num_classes=4)
    >>> adapted(net, 3).eval()(torch.zeros(1, 3, 64, 64))[0].keys()
    dict_keys(['boxes', 'labels', 'scores'])
    """
    for kind, family in _FAMILIES:
        if isinstance(net, kind):
            return family(net, classes)
    raise ConfigError(
        f"{type(net).__name__} is not a FasterRCNN, SSD, RetinaNet or FCOS of torchvision",
        where="model",
        hint="write a module that is called as fedlens.vision.detector.Detector says",
    )


def ssdlite(
    input_shape: Sequence[int],
    classes: int,
    *,
    score_threshold: ScoreThreshold = 0.001,
    suppression_iou: SuppressionIou = 0.55,
    detections: Detections = 300,
) -> nn.Module:
    """SSDLite on MobileNetV3-Large (Howard et al. 2019, arXiv 1905.02244, section 6.3), made for images of 320x320.

    The last layers of the body have half the channels ("reduced tail"), as in the paper: weights of the classifier are
    loaded up to these. It takes other sizes too: its anchors scale with the image.

    >>> sum(p.numel() for p in ssdlite((3, 320, 320), 3).parameters())
    2234240
    """
    return _made(
        detection.ssdlite320_mobilenet_v3_large,
        input_shape,
        classes,
        "ssdlite",
        _MOBILENET_V3,
        score_thresh=score_threshold,
        nms_thresh=suppression_iou,
        detections_per_img=detections,
    )


def fasterrcnn_mobilenet(
    input_shape: Sequence[int],
    classes: int,
    *,
    score_threshold: ScoreThreshold = 0.001,
    suppression_iou: SuppressionIou = 0.5,
    detections: Detections = 300,
) -> nn.Module:
    """Faster R-CNN with a feature pyramid on MobileNetV3-Large (Ren et al. 2015, arXiv 1506.01497)."""
    return _made(
        detection.fasterrcnn_mobilenet_v3_large_fpn,
        input_shape,
        classes,
        "fasterrcnn-mobilenet",
        _MOBILENET_V3,
        box_score_thresh=score_threshold,
        box_nms_thresh=suppression_iou,
        box_detections_per_img=detections,
    )


def retinanet(
    input_shape: Sequence[int],
    classes: int,
    *,
    score_threshold: ScoreThreshold = 0.001,
    suppression_iou: SuppressionIou = 0.5,
    detections: Detections = 300,
) -> nn.Module:
    """RetinaNet on ResNet-50 (Lin et al. 2017, arXiv 1708.02002)."""
    return _made(
        detection.retinanet_resnet50_fpn,
        input_shape,
        classes,
        "retinanet",
        "resnet50",
        score_thresh=score_threshold,
        nms_thresh=suppression_iou,
        detections_per_img=detections,
    )


def _made(
    factory: Callable[..., nn.Module],
    input_shape: Sequence[int],
    classes: int,
    name: str,
    body: str,
    **settings: Any,
) -> nn.Module:
    channels, *size = input_shape
    if channels != 3 or min(size) < 32:
        raise ConfigError(
            f"the model '{name}' takes colour images from 32x32 on, but they are {channels}x{'x'.join(map(str, size))}",
            where="model.name",
            hint="choose a larger data.dataset.size, or colour images",
        )
    net = factory(weights=None, weights_backbone=None, num_classes=classes + 1, **settings)
    detector = adapted(net, classes)
    detector.body = body
    return detector
