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


class CifarResNet(nn.Module):
    """A convolution, three stages of blocks, the mean over the image, and one linear layer."""

    def __init__(self, channels: int, classes: int, blocks: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, 1)
        self.layer2 = _stage(width, 2 * width, blocks, 2)
        self.layer3 = _stage(2 * width, 4 * width, blocks, 2)
        self.linear = nn.Linear(4 * width, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, H, W]."""
        x = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    further = (ResidualBlock(outputs, outputs, 1) for _ in range(blocks - 1))
    return nn.Sequential(ResidualBlock(inputs, outputs, stride), *further)


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
