"""The blocks of the YOLOv5 networks, and their backbone and neck.

Written from the published papers: CSPNet (Wang et al. 2020, arXiv 1911.11929), spatial pyramid pooling (He et al.
2015, arXiv 1406.4729) as YOLOv4 has it (Bochkovskiy et al. 2020, arXiv 2004.10934), PANet (Liu et al. 2018, arXiv
1803.01534) and SiLU (Elfwing et al. 2018, arXiv 1702.03118).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

_STAGES = ((128, 3), (256, 9), (512, 9), (1024, 3))  # channels and bottlenecks at width and depth 1
_NECK_BOTTLENECKS = 3
_EPS, _MOMENTUM = 1e-3, 0.03  # of batch normalization


@dataclass(frozen=True)
class Size:
    """The size of a network: factors of its channels and of its numbers of bottlenecks.

    >>> small = Size(width=0.5, depth=0.33)
    >>> small.channels(64), Size(1.25, 1.33).channels(64), small.bottlenecks(9), Size(0.25, 0.1).bottlenecks(3)
    (32, 80, 3, 1)
    """

    width: float
    depth: float

    def channels(self, full: int) -> int:
        """`full` times the width, up to the next multiple of 8."""
        return 8 * ceil(full * self.width / 8)

    def bottlenecks(self, full: int) -> int:
        """`full` times the depth, rounded, at least 1."""
        return max(round(full * self.depth), 1)


class ConvNormAct(nn.Module):
    """A convolution without bias, batch normalization and SiLU: images [n, inputs, H, W] to [n, outputs, H', W'].

    It is padded by half its kernel, so that a stride of 1 keeps the size, and one of 2 halves it.

    >>> ConvNormAct(3, 8, 3, stride=2)(torch.zeros(2, 3, 32, 64)).shape
    torch.Size([2, 8, 16, 32])
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=_EPS, momentum=_MOMENTUM)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return functional.silu(self.norm(self.conv(x)), inplace=True)


class Focus(nn.Module):
    """2x2 pixels to channels, then a 3x3 convolution: [n, inputs, H, W] to [n, outputs, H / 2, W / 2].

    >>> Focus(3, 8)(torch.zeros(2, 3, 32, 64)).shape
    torch.Size([2, 8, 16, 32])
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = ConvNormAct(4 * inputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        y: Tensor = self.layer(functional.pixel_unshuffle(x, 2))
        return y


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution that keep the channels, with a shortcut around both if it is asked for.

    >>> Bottleneck(8, shortcut=True)(torch.zeros(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = ConvNormAct(channels, channels, 1)
        self.conv2 = ConvNormAct(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y: Tensor = self.conv2(self.conv1(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """A cross-stage partial block of three 1x1 convolutions: [n, inputs, H, W] to [n, outputs, H, W].

    One convolution leads to the bottlenecks and one around them, each with half of the outputs; the third joins both.

    >>> C3(8, 16, bottlenecks=2, shortcut=True)(torch.zeros(2, 8, 4, 4)).shape
    torch.Size([2, 16, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, bottlenecks: int, shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.through = ConvNormAct(inputs, half, 1)
        self.around = ConvNormAct(inputs, half, 1)
        self.bottlenecks = nn.Sequential(*(Bottleneck(half, shortcut) for _ in range(bottlenecks)))
        self.join = ConvNormAct(2 * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y: Tensor = self.join(torch.cat([self.bottlenecks(self.through(x)), self.around(x)], 1))
        return y


class PyramidPooling(nn.Module):
    """SPP: the largest value of 5x5, 9x9 and 13x13 pixels beside the input, between two 1x1 convolutions.

    Two 5x5 windows in a row cover 9x9 pixels and three cover 13x13, so three small windows give the same as the large
    ones, with fewer comparisons.

    >>> PyramidPooling(8)(torch.zeros(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.reduce = ConvNormAct(channels, half, 1)
        self.pool = nn.MaxPool2d(5, stride=1, padding=2)
        self.join = ConvNormAct(4 * half, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        pooled = [self.reduce(x)]
        for _ in range(3):
            pooled.append(self.pool(pooled[-1]))
        y: Tensor = self.join(torch.cat(pooled, 1))
        return y


class Backbone(nn.Module):
    """Focus and four stages, each a 3x3 convolution of stride 2 and a C3; the last one with SPP between them.

    >>> [tuple(map_.shape) for map_ in Backbone(3, Size(0.25, 0.33)).eval()(torch.zeros(1, 3, 64, 32))]
    [(1, 64, 8, 4), (1, 128, 4, 2), (1, 256, 2, 1)]
    """

    def __init__(self, channels: int, size: Size) -> None:
        super().__init__()
        inputs = size.channels(64)
        self.stem = Focus(channels, inputs)
        self.stages = nn.ModuleList()
        for full, bottlenecks in _STAGES:
            outputs, last = size.channels(full), full == _STAGES[-1][0]
            layers: list[nn.Module] = [ConvNormAct(inputs, outputs, 3, stride=2)]
            layers += [PyramidPooling(outputs)] if last else []
            layers += [C3(outputs, outputs, size.bottlenecks(bottlenecks), shortcut=not last)]
            self.stages.append(nn.Sequential(*layers))
            inputs = outputs

    def forward(self, images: Tensor) -> list[Tensor]:
        """The feature maps of strides 8, 16 and 32 of images [n, channels, H, W], H and W multiples of 32."""
        x, maps = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps[1:]


class Neck(nn.Module):
    """A top-down path and a bottom-up path over the feature maps of the backbone (PANet).

    >>> maps = [torch.zeros(1, 64, 8, 4), torch.zeros(1, 128, 4, 2), torch.zeros(1, 256, 2, 1)]
    >>> [tuple(map_.shape) for map_ in Neck(Size(0.25, 0.33)).eval()(maps)]
    [(1, 64, 8, 4), (1, 128, 4, 2), (1, 256, 2, 1)]
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.channels = small, middle, large = [size.channels(full) for full, _ in _STAGES[1:]]

        def joined(inputs: int, outputs: int) -> C3:
            return C3(inputs, outputs, size.bottlenecks(_NECK_BOTTLENECKS), shortcut=False)

        self.reduce1 = ConvNormAct(large, middle, 1)
        self.top_down1 = joined(2 * middle, middle)
        self.reduce2 = ConvNormAct(middle, small, 1)
        self.top_down2 = joined(2 * small, small)
        self.down1 = ConvNormAct(small, small, 3, stride=2)
        self.bottom_up1 = joined(2 * small, middle)
        self.down2 = ConvNormAct(middle, middle, 3, stride=2)
        self.bottom_up2 = joined(2 * middle, large)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """The feature maps of strides 8, 16 and 32, in the shapes of the given ones."""
        fine, middle, coarse = maps
        lateral1 = self.reduce1(coarse)
        lateral2 = self.reduce2(self.top_down1(torch.cat([_doubled(lateral1), middle], 1)))
        first = self.top_down2(torch.cat([_doubled(lateral2), fine], 1))
        second = self.bottom_up1(torch.cat([self.down1(first), lateral2], 1))
        third = self.bottom_up2(torch.cat([self.down2(second), lateral1], 1))
        return [first, second, third]


def _doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")
