"""The small models of the papers. Each takes images [n, C, H, W] and gives logits [n, classes]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.models.norms import Norm, with_norm

Width = Annotated[int, Field(ge=1, le=65536, description="units per layer")]
Layers = Annotated[
    Width | Annotated[list[Width], Field(min_length=1)],
    Field(description="units per hidden layer, or a list with those of each one"),
]


def linear(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression on the pixels.

    >>> sum(p.numel() for p in linear((1, 28, 28), 10).parameters())
    7850
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))


def mlp(input_shape: Sequence[int], classes: int, *, hidden: Layers = 200) -> nn.Module:
    """The 2NN of McMahan et al. 2017 (arXiv 1602.05629, section 3): two hidden layers with ReLU.

    A list `hidden` gives each hidden layer its own units, and their number.

    >>> sum(p.numel() for p in mlp((1, 28, 28), 10).parameters())
    199210
    >>> [layer for layer in mlp((1, 8, 8), 10, hidden=[50, 30]) if isinstance(layer, nn.Linear)][1]
    Linear(in_features=50, out_features=30, bias=True)
    """
    widths = [prod(input_shape), *([hidden] * 2 if isinstance(hidden, int) else hidden)]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


def small_cnn(
    input_shape: Sequence[int],
    classes: int,
    *,
    width: Width = 16,
    norm: Annotated[
        Literal["none", "batch", "group", "layer", "frozen"],
        Field(description="normalization after each convolution"),
    ] = "none",
) -> nn.Module:
    """Two 3x3 convolutions with ReLU, one 2x2 max-pooling between them, and one linear layer.

    For images such as the 8x8 digits; inputs of at least 2x2. `norm` is as `fedlens.models.norms.with_norm` has it.

    >>> sum(p.numel() for p in small_cnn((1, 8, 8), 10).parameters())
    9930
    """
    channels, height, long = input_shape
    at_least(input_shape, 2, "small-cnn")
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        *_normalization(norm, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        *_normalization(norm, 2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 2) * (long // 2), classes),
    )


def _normalization(norm: Literal["none"] | Norm, channels: int) -> list[nn.Module]:
    return [] if norm == "none" else [with_norm(nn.BatchNorm2d(channels), norm)]


def mcmahan_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The CNN of McMahan et al. 2017 and of ghaemi2022 section 3.

    Two 5x5 convolutions (32 and 64 channels, padding 2), each followed by ReLU and 2x2 max-pooling of stride 2;
    512 units; softmax. ghaemi2022 prints padding 1, with sizes that do not fit it: padding 2 gives its 14x14x32,
    7x7x64, 3,136 features, and its parameter count.

    >>> sum(p.numel() for p in mcmahan_cnn((1, 28, 28), 10).parameters())
    1663370
    """
    channels, height, long = input_shape
    at_least(input_shape, 4, "mcmahan-cnn")
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (long // 4), 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def hsu_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The CIFAR CNN of hsu2019 section 4 (after McMahan et al. 2017, who follow a TensorFlow tutorial).

    Two 5x5 convolutions of 64 channels with same padding, each followed by ReLU and 2x2 max-pooling; 384 and 192
    units with ReLU. The padding is not stated there; "same" is our reading. The tutorial's local response
    normalization is left out, as in the usual re-implementations.

    >>> sum(p.numel() for p in hsu_cnn((3, 32, 32), 10).parameters())
    1756426
    """
    channels, height, long = input_shape
    at_least(input_shape, 4, "hsu-cnn")
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (long // 4), 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def vgg9(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The VGG-9 of FedMA (Wang et al. 2020, arXiv 2002.06440): 3,491,530 weights for 10 classes of 32x32 images.

    Three blocks of two 3x3 convolutions (32 and 64, 128 and 128, 256 and 256 channels, padding 1) with ReLU and 2x2
    max-pooling; 512 and 512 units with ReLU. Dropout is that of the authors' code: of channels with probability 0.05
    after the second block, and of 0.1 of the units before the first and the last linear layer.

    >>> sum(p.numel() for p in vgg9((3, 32, 32), 10).parameters())
    3491530
    """
    channels, height, long = input_shape
    at_least(input_shape, 8, "vgg9")
    layers: list[nn.Module] = []
    for first, second in ((32, 64), (128, 128), (256, 256)):
        for before, after in ((channels, first), (first, second)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = second
    layers.insert(10, nn.Dropout2d(0.05))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256 * (height // 8) * (long // 8), 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, classes),
    )


def at_least(input_shape: Sequence[int], pixels: int, name: str, instead: str = "'linear' or 'mlp'") -> None:
    """Raises `ConfigError` for images with a side below `pixels`; the hint names the models `instead`."""
    if min(input_shape[1:]) < pixels:
        size = "x".join(str(extent) for extent in input_shape[1:])
        raise ConfigError(
            f"the model '{name}' needs images of at least {pixels}x{pixels}, but they are {size}",
            where="model.name",
            hint=f"take {instead}",
        )
