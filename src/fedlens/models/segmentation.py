"""Networks that give each pixel of an image its class: U-Net and DeepLabV3+ on the body of a classifier.

They are made of parts of segmentation-models-pytorch and torchvision, which the extra `vision` has, and which are
imported when one of them is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedlens.base.errors import ConfigError
from fedlens.models.backbone import WithBackbone
from fedlens.models.mobilenet_names import mobilenet_v2_leaf
from fedlens.models.simple import at_least

Backbone = Annotated[
    Literal["mobilenet-v2", "resnet18", "resnet34", "resnet50", "resnet101"],
    Field(description="the classifier whose body is the encoder"),
]
Atrous = Annotated[
    Literal["separable", "plain"],
    Field(
        description="the atrous convolutions: 'separable' of rates 12, 24, 36, as segmentation-models-pytorch has "
        "them, or 'plain' of rates 6, 12, 18, the network of fedcv's table 7"
    ),
]

# The names of segmentation-models-pytorch's encoder and of timm's classifier, by ours.
ENCODERS = {
    "mobilenet-v2": ("mobilenet_v2", "mobilenetv2_100"),
    "resnet18": ("resnet18", "resnet18"),
    "resnet34": ("resnet34", "resnet34"),
    "resnet50": ("resnet50", "resnet50"),
    "resnet101": ("resnet101", "resnet101"),
}
_SMALLEST, _STRIDE, _FEATURES, _FINE = 32, 16, 256, 48
_RATES = [6, 12, 18]


class SegmentationNetwork(WithBackbone):
    """An encoder, a decoder of its features, and a head that gives the logits of each class at each pixel.

    Args:
        encoder: takes images [n, C, H, W], and returns them and their features at strides 2, 4, 8, 16 and the last.
        decoder: takes that list.
        segmentation_head: takes the decoder's output, and returns [n, classes, H, W].
        multiple: the sides that the network needs are multiples of it. Other images get rows and columns of zeros
            below and to the right, which the logits lose again.
        body: timm's name of the classifier that the encoder is the body of.

    >>> import torch
    >>> upsample = nn.Upsample(scale_factor=4)
    >>> encoder, decoder = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 1)
    >>> net = SegmentationNetwork(encoder, decoder, nn.Sequential(nn.Conv2d(8, 5, 1), upsample), 4, None)
    >>> net(torch.zeros(2, 3, 30, 41)).shape
    torch.Size([2, 5, 30, 41])
    """

    backbone = "encoder"
    heads = ("segmentation_head",)

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        segmentation_head: nn.Module,
        multiple: int,
        body: str | None,
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.segmentation_head = encoder, decoder, segmentation_head
        self.multiple, self.body = multiple, body

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes, H, W] of images [n, C, H, W]."""
        height, width = images.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        if below or right:
            images = functional.pad(images, (0, right, 0, below))
        logits: Tensor = self.segmentation_head(self.decoder(self.encoder(images)))
        return logits[..., :height, :width] if below or right else logits

    def backbone_leaf(self, name: str) -> str | None:
        """timm's names of MobileNetV2 in torchvision's words; both have the same names of a ResNet."""
        return mobilenet_v2_leaf(name) if self.body == "mobilenetv2_100" else name


class PlainDecoder(nn.Module):
    """DeepLabV3+'s decoder (Chen et al. 2018, arXiv 1802.02611) with plain convolutions, as fedcv's table 7 counts it.

    torchvision's atrous spatial pyramid of rates 6, 12 and 18 on the features at stride 16, enlarged four times, beside
    48 channels of those at stride 4, and two 3x3 convolutions.

    Args:
        coarse: channels of the features at stride 16.
        fine: channels of those at stride 4.
    """

    def __init__(self, coarse: int, fine: int) -> None:
        from torchvision.models.segmentation.deeplabv3 import ASPP

        super().__init__()
        self.aspp = ASPP(coarse, _RATES, _FEATURES)
        self.up = nn.Upsample(scale_factor=4, mode="bilinear")
        self.block1 = _block(fine, _FINE, 1)
        self.block2 = nn.Sequential(_block(_FEATURES + _FINE, _FEATURES, 3), _block(_FEATURES, _FEATURES, 3))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Features [n, 256, H/4, W/4] of those that the encoder returns."""
        both = self.up(self.aspp(features[-1])), self.block1(features[2])
        merged: Tensor = self.block2(torch.cat(both, dim=1))
        return merged


def _block(inputs: int, outputs: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def _library(name: str) -> Any:
    try:
        import segmentation_models_pytorch
    except ImportError:
        raise ConfigError(
            f"the model '{name}' needs segmentation-models-pytorch, which is not installed",
            where="model.name",
            hint="run: pip install 'fedlens[vision]'",
        ) from None
    return segmentation_models_pytorch


def _sides(name: str, input_shape: Sequence[int]) -> None:
    at_least(input_shape, _SMALLEST, name, "larger images: data.dataset.size sets their size")


def unet(input_shape: Sequence[int], classes: int, *, backbone: Backbone = "mobilenet-v2") -> nn.Module:
    """U-Net (Ronneberger et al. 2015, arXiv 1505.04597) on the body of a classifier, of segmentation-models-pytorch.

    Five times the features are enlarged to those of the next finer stride, put beside them, and go through two 3x3
    convolutions, of 256 to 16 channels. It takes images [n, C, H, W] of any size from 32x32 on, and returns logits
    [n, classes, H, W].

    Raises `ConfigError` without the extra `vision`, and for smaller images; so does `deeplabv3plus`.

    >>> sum(p.numel() for p in unet((3, 64, 64), 21).parameters())
    6631845
    """
    smp = _library("unet")
    _sides("unet", input_shape)
    encoder, body = ENCODERS[backbone]
    made = smp.Unet(encoder, encoder_weights=None, in_channels=input_shape[0], classes=classes)
    return SegmentationNetwork(made.encoder, made.decoder, made.segmentation_head, 1, body)


def deeplabv3plus(
    input_shape: Sequence[int],
    classes: int,
    *,
    backbone: Backbone = "mobilenet-v2",
    atrous: Atrous = "separable",
) -> nn.Module:
    """DeepLabV3+ (Chen et al. 2018, arXiv 1802.02611) on the body of a classifier, at output stride 16.

    An atrous spatial pyramid on the features at stride 16, beside 48 channels of those at stride 4. `atrous` chooses
    the decoder of segmentation-models-pytorch, or `PlainDecoder`, drawn in the same way and on MobileNetV2 up to its
    320 channels. Takes and returns what `unet` does; sides that are no multiple of 16 are padded inside with zeros.

    The pyramid has a mean over the image, so under batch normalization it cannot train on a batch of one image.

    >>> sum(p.numel() for p in deeplabv3plus((3, 64, 64), 21, atrous="plain").parameters())
    5816053
    """
    smp = _library("deeplabv3plus")
    _sides("deeplabv3plus", input_shape)
    name, body = ENCODERS[backbone]
    channels = input_shape[0]
    if atrous == "separable":
        made = smp.DeepLabV3Plus(name, encoder_weights=None, in_channels=channels, classes=classes)
        return SegmentationNetwork(made.encoder, made.decoder, made.segmentation_head, _STRIDE, body)
    encoder = smp.encoders.get_encoder(name, in_channels=channels, weights=None, output_stride=_STRIDE)
    *_, coarse = encoder.out_channels
    if backbone == "mobilenet-v2":  # fedcv's ends before the convolution from 320 to 1,280 channels
        coarse = encoder.features[-1][0].in_channels
        encoder.features = encoder.features[:-1]
        encoder._out_indexes[-1] -= 1
    decoder = PlainDecoder(coarse, encoder.out_channels[2])
    head = nn.Sequential(nn.Conv2d(_FEATURES, classes, 1), nn.Upsample(scale_factor=4, mode="bilinear"))
    smp.base.initialization.initialize_decoder(decoder)
    smp.base.initialization.initialize_head(head)
    return SegmentationNetwork(encoder, decoder, head, _STRIDE, body)
