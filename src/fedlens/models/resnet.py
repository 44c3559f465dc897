"""The ResNets of He, Zhang, Ren and Sun 2016 (arXiv 1512.03385), section 4.2, for small images such as CIFAR's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedlens.models.simple import at_least

Channels = Annotated[
    int,
    Field(
        ge=1, le=4096, description="channels of the first stage; the others have two and four times as many"
    ),
]


FeatureChannels = Annotated[
    int,
    Field(ge=1, le=4096, description="channels of the features that FedGKT sends; the stages grow with it"),
]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: images [n, inputs, H, W] to [n, outputs, H', W'].

    With a stride of 2 the shortcut takes every second row and column, and pads the channels with zeros on both sides
    (option A of the paper).

    >>> import torch
    >>> ResidualBlock(4, 8, stride=2)(torch.zeros(2, 4, 7, 7)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.before = stride, (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.before + self.after:
            x = functional.pad(x, (0, 0, 0, 0, self.before, self.after))
        return functional.relu(y + x, inplace=True)


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions of `width` channels: images [n, inputs, H, W] to [n, 4 width, H', W'].

    The stride is that of the 3x3 convolution. Where the form changes, the shortcut is a 1x1 convolution with batch
    normalization (option B of the paper).

    >>> import torch
    >>> BottleneckBlock(4, 2, stride=2)(torch.zeros(2, 4, 7, 7)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.downsample.extend(
                [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = functional.relu(self.bn2(self.conv2(y)), inplace=True)
        return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)


class CifarResNet(nn.Module):
    """A convolution, stages of blocks, the mean over the image, and one linear layer."""

    def __init__(
        self, channels: int, classes: int, blocks: int, width: int, stages: int = 3, bottlenecks: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages, features = [f"layer{i + 1}" for i in range(stages)], width
        for i, name in enumerate(self.stages):
            stage, features = _stage(features, width * 2**i, blocks, 2 if i else 1, bottlenecks)
            self.add_module(name, stage)
        self.linear = nn.Linear(features, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, H, W]."""
        x = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def _stage(inputs: int, width: int, blocks: int, stride: int, bottlenecks: bool) -> tuple[nn.Sequential, int]:
    """A stage, and the channels that it gives."""
    kind, outputs = (BottleneckBlock, 4 * width) if bottlenecks else (ResidualBlock, width)
    further = (kind(outputs, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(kind(inputs, width, stride), *further), outputs


def _resnet(input_shape: Sequence[int], classes: int, layers: int, width: int) -> nn.Module:
    at_least(input_shape, 8, f"resnet{layers}")
    return CifarResNet(input_shape[0], classes, (layers - 2) // 6, width)


def resnet20(input_shape: Sequence[int], classes: int, *, width: Channels = 16) -> nn.Module:
    """ResNet-20: 19 convolutions in blocks with parameter-free shortcuts, and one linear layer.

    For images of at least 8x8. chen2022 (section 6.6, figure 8) widens it: `width = 32` is twice as wide. Names of the
    leaves are those of github.com/akamaster/pytorch_resnet_cifar10.

    >>> sum(p.numel() for p in resnet20((3, 32, 32), 10).parameters())
    269722
    """
    return _resnet(input_shape, classes, 20, width)


def resnet32(input_shape: Sequence[int], classes: int, *, width: Channels = 16) -> nn.Module:
    """ResNet-32: as `resnet20`, with 5 blocks in each stage.

    >>> sum(p.numel() for p in resnet32((3, 32, 32), 10).parameters())
    464154
    """
    return _resnet(input_shape, classes, 32, width)


def resnet44(input_shape: Sequence[int], classes: int, *, width: Channels = 16) -> nn.Module:
    """ResNet-44: as `resnet20`, with 7 blocks in each stage.

    >>> sum(p.numel() for p in resnet44((3, 32, 32), 10).parameters())
    658586
    """
    return _resnet(input_shape, classes, 44, width)


def resnet56(input_shape: Sequence[int], classes: int, *, width: Channels = 16) -> nn.Module:
    """ResNet-56: as `resnet20`, with 9 blocks in each stage.

    >>> sum(p.numel() for p in resnet56((3, 32, 32), 10).parameters())
    853018
    """
    return _resnet(input_shape, classes, 56, width)


def gkt_resnet8(input_shape: Sequence[int], classes: int, *, width: FeatureChannels = 16) -> nn.Module:
    """The client's network of FedGKT: a 3x3 convolution, one stage of two bottlenecks, and one linear layer.

    For images of at least 8x8. What it gives after `bn1` and its ReLU, [n, width, H, W], are the features that FedGKT
    sends. FedGKT's paper (arXiv 2007.14513, table 2) has other layers than the `resnet8` of He et al. would have.

    >>> sum(p.numel() for p in gkt_resnet8((3, 32, 32), 10).parameters())
    10586
    """
    at_least(input_shape, 8, "gkt-resnet8")
    return CifarResNet(input_shape[0], classes, 2, width, stages=1, bottlenecks=True)


def gkt_resnet56(input_shape: Sequence[int], classes: int, *, width: FeatureChannels = 16) -> nn.Module:
    """The whole large network of FedGKT: as `gkt_resnet8`, with three stages of 6 bottlenecks.

    FedGKT trains at the server what follows `bn1` and its ReLU. `resnet56` has other blocks and more weights.

    >>> sum(p.numel() for p in gkt_resnet56((3, 32, 32), 10).parameters())
    591322
    """
    at_least(input_shape, 8, "gkt-resnet56")
    return CifarResNet(input_shape[0], classes, 6, width, bottlenecks=True)
