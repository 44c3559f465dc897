"""The YOLOv5 detectors, release 4.0: nano, small, medium, large and extra large.

Written from a description of the network and from the published papers: YOLOv3 (Redmon and Farhadi 2018, arXiv
1804.02767), YOLOv4 (Bochkovskiy et al. 2020, arXiv 2004.10934), and those that `yolov5_blocks` and `yolov5_loss` name.
No code and no weights of the authors' are in it: theirs are under the GPL and the AGPL. fedcv (002, section 6.3) trains
four of these networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedlens.models.backbone import WithBackbone
from fedlens.models.yolov5.blocks import Backbone, Neck, Size
from fedlens.models.yolov5.decoding import CLASSES, OBJECTNESS, Suppression, detections
from fedlens.models.yolov5.loss import ANCHORS, Gains, losses, unmatched_share
from fedlens.vision.detector import Detector

STRIDES = (8, 16, 32)
_UNMATCHED = 0.02  # the share of boxes that no anchor fits, above which a note says so

_Side = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Pair = Annotated[list[_Side], Field(min_length=2, max_length=2)]
_Gain = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Anchors = Annotated[
    list[_Pair] | None,
    Field(
        min_length=9,
        max_length=9,
        description="nine pairs of width and height in pixels, three for each of the strides 8, 16 and 32; by default "
        "those of COCO",
    ),
]
ScoreThreshold = Annotated[
    float, Field(ge=0, le=1, description="only boxes with a score above this are given")
]
SuppressionIou = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="of two boxes of one class that overlap by more than this, the better one is kept",
    ),
]
Detections = Annotated[int, Field(ge=1, le=100_000, description="the most boxes that are given for an image")]
BoxGain = Annotated[_Gain, Field(description="weight of the boxes in the loss")]
ClassGain = Annotated[_Gain, Field(description="weight of the classes in the loss, for 80 classes")]
ObjectnessGain = Annotated[
    _Gain, Field(description="weight of the objectness in the loss, for images of 640 pixels")
]


class Yolov5(WithBackbone, Detector):
    """A YOLOv5 detector for images float [n, channels, H, W] of any size.

    Images are padded at the right and at the bottom to multiples of 32 pixels. The padding is 0, the mean of the
    dataset after normalization. Boxes are cut to the image.

    - In training, `module(images, targets)` gives the losses of `fedlens.models.yolov5.loss.losses`. `targets` are n
      dictionaries of `boxes` float [k, 4], left, top, right, bottom in pixels, and `labels` int64 [k] from 0 on.
    - In evaluation, `module(images)` gives n dictionaries with `scores` float [k] besides, see
      `fedlens.models.yolov5.decoding.detections`.

    Weights are drawn as PyTorch does. To the biases of the objectness log(8 / (640 / stride)^2) is added, as if 8
    objects were in an image of 640x640, and to those of the classes log(0.6 / (classes - 0.99)).

    >>> module = yolov5n((3, 64, 64), 3).eval()
    >>> sorted(module(torch.zeros(2, 3, 60, 50))[0]), module.raw(torch.zeros(2, 3, 60, 50))["stride32"].shape
    (['boxes', 'labels', 'scores'], torch.Size([2, 3, 2, 2, 8]))
    """

    backbone = "encoder"
    heads = ("head",)
    plain_targets = True
    anchors: Tensor

    def __init__(
        self,
        channels: int,
        classes: int,
        size: Size,
        anchors: Sequence[Sequence[float]],
        suppression: Suppression,
        gains: Gains,
    ) -> None:
        super().__init__()
        self.encoder = Backbone(channels, size)
        self.neck = Neck(size)
        each = len(anchors) // len(STRIDES)
        self.head = nn.ModuleList(
            nn.Conv2d(inputs, each * (classes + CLASSES), 1) for inputs in self.neck.channels
        )
        pairs = torch.tensor(anchors, dtype=torch.get_default_dtype()).view(len(STRIDES), each, 2)
        self.register_buffer("anchors", pairs, persistent=False)  # the settings of a run have them
        self.plain_anchors = pairs.clone()  # stay in CPU memory, where boxes are assigned to them
        self.suppression, self.gains = suppression, gains
        for layer, stride in zip(self.head, STRIDES, strict=True):
            assert isinstance(layer, nn.Conv2d)
            _raise_biases(layer, each, stride, classes)

    def raw(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs by stride, `stride8`, `stride16` and `stride32`, each [n, 3, rows, columns, classes + 5].

        In the last dimension are four numbers of the box, then the logits of the objectness and of the classes.
        """
        return {f"stride{stride}": outputs for stride, outputs in self._outputs(images).items()}

    def forward(self, images: Tensor, targets: Sequence[dict[str, Tensor]] | None = None) -> Any:
        """The losses by name in training, the boxes of each image in evaluation."""
        outputs = self._outputs(images)
        if not self.training:
            anchors = dict(zip(STRIDES, self.anchors, strict=True))
            return detections(outputs, anchors, images.shape[2], images.shape[3], self.suppression)
        if targets is None:
            raise ValueError("a detector in training mode needs the targets of the images")
        return losses(outputs, dict(zip(STRIDES, self.plain_anchors, strict=True)), targets, self.gains)

    def notes(self, boxes: Tensor) -> list[str]:
        """A sentence with the share of boxes [m, 4] that no anchor fits, where it is above 2 %."""
        share = unmatched_share(boxes, self.anchors.flatten(0, 1).to(boxes))
        if share <= _UNMATCHED:
            return []
        return [
            f"{share:.1%} of the {len(boxes):,} training boxes fit none of the anchors of the model, so it does not "
            "learn them: a side is 0, or differs from that of every anchor by a factor of 4 or more; set model.anchors"
        ]

    def _outputs(self, images: Tensor) -> dict[int, Tensor]:
        height, width = images.shape[2:]
        padding = (0, -width % STRIDES[-1], 0, -height % STRIDES[-1])
        if any(padding):
            images = functional.pad(images, padding)
        maps = self.neck(self.encoder(images))
        each = self.anchors.shape[1]
        return {
            stride: layer(map_).unflatten(1, (each, -1)).permute(0, 1, 3, 4, 2)
            for stride, layer, map_ in zip(STRIDES, self.head, maps, strict=True)
        }


def _raise_biases(layer: nn.Conv2d, each: int, stride: int, classes: int) -> None:
    with torch.no_grad():
        assert layer.bias is not None
        biases = layer.bias.view(each, -1)
        biases[:, OBJECTNESS] += log(8 / (640 / stride) ** 2)
        biases[:, CLASSES:] += log(0.6 / (classes - 0.99))


def _factory(name: str, width: float, depth: float, parameters: str) -> Callable[..., Yolov5]:
    """The factory of one size; `parameters` is their number at 80 classes."""

    def make(
        input_shape: Sequence[int],
        classes: int,
        *,
        anchors: Anchors = None,
        score_threshold: ScoreThreshold = 0.001,
        suppression_iou: SuppressionIou = 0.6,
        detections: Detections = 300,
        box_gain: BoxGain = 0.05,
        class_gain: ClassGain = 0.5,
        objectness_gain: ObjectnessGain = 1.0,
    ) -> Yolov5:
        return Yolov5(
            input_shape[0],
            classes,
            Size(width, depth),
            ANCHORS if anchors is None else anchors,
            Suppression(score_threshold, suppression_iou, detections),
            Gains(box_gain, class_gain, objectness_gain),
        )

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"""YOLOv5 of width {width} and depth {depth}; see `Yolov5`.

    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in {name}((3, 640, 640), 80).parameters())
    {parameters}
    """
    return make


yolov5n = _factory("yolov5n", 0.25, 0.33, "1882525")
yolov5s = _factory("yolov5s", 0.5, 0.33, "7276605")
yolov5m = _factory("yolov5m", 0.75, 0.67, "21375645")
yolov5l = _factory("yolov5l", 1.0, 1.0, "47056765")
yolov5x = _factory("yolov5x", 1.25, 1.33, "87775965")
