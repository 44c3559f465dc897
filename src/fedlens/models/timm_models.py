"""Networks of timm (github.com/huggingface/pytorch-image-models), without its weights.

timm is in the extra `vision`, and is imported when one of them is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.models.simple import at_least

Dropout = Annotated[float, Field(ge=0, lt=1, description="share of features set to 0 before the classifier")]
DropPath = Annotated[
    float,
    Field(ge=0, lt=1, description="stochastic depth: how often the last block is skipped, the first never"),
]

Patch = Annotated[int, Field(ge=1, le=256, description="height and width of a patch, in pixels")]

# timm's name of each network, by ours.
TIMM_NAMES = {
    "resnet18": "resnet18",
    "resnet34": "resnet34",
    "resnet50": "resnet50",
    "mobilenet-v2": "mobilenetv2_100",
    "mobilenet-v3-large": "mobilenetv3_large_100",
    "efficientnet-b0": "efficientnet_b0",
    "vit-b-16": "vit_base_patch16_224",
    "vit-tiny": "vit_tiny_patch16_224",
}
_FEWEST = 4  # patches along a side


def _made(
    name: str, input_shape: Sequence[int], classes: int, dropout: float, drop_path: float, **more: Any
) -> nn.Module:
    try:
        import timm
        from timm.layers.linear import Linear
    except ImportError:
        raise ConfigError(
            f"the model '{name}' needs timm, which is not installed",
            where="model.name",
            hint="run: pip install 'fedlens[vision]'",
        ) from None
    module: nn.Module = timm.create_model(
        TIMM_NAMES[name],
        in_chans=input_shape[0],
        num_classes=classes,
        drop_rate=dropout,
        drop_path_rate=drop_path,
        **more,
    )
    plain: Any = nn.Linear  # timm's differs in TorchScript only, and batched training knows PyTorch's
    for layer in module.modules():
        if type(layer) is Linear:
            layer.__class__ = plain
    return module


def _convolutional(
    name: str, input_shape: Sequence[int], classes: int, dropout: float, drop_path: float
) -> nn.Module:
    at_least(input_shape, 8, name)
    return _made(name, input_shape, classes, dropout, drop_path)


def _transformer(
    name: str, input_shape: Sequence[int], classes: int, patch: int, dropout: float, drop_path: float
) -> nn.Module:
    size = tuple(input_shape[1:])
    least = _FEWEST * patch
    if any(side < least or side % patch for side in size):
        raise ConfigError(
            f"the model '{name}' takes images whose sides are multiples of {patch}, from {least}x{least} on, "
            f"but they are {'x'.join(map(str, size))}",
            where="model.name",
            hint="resize them, to 224x224 for its published weights, or set a smaller model.patch, 4 for 32x32 images",
        )
    return _made(name, input_shape, classes, dropout, drop_path, img_size=size, patch_size=patch)


def resnet18(
    input_shape: Sequence[int], classes: int, *, dropout: Dropout = 0.0, drop_path: DropPath = 0.0
) -> nn.Module:
    """ResNet-18 (He et al. 2016, arXiv 1512.03385): a 7x7 convolution of stride 2, pooling, and 8 blocks.

    Raises `ConfigError` without timm, and for images below 8x8; so do the other convolutional networks.

    >>> sum(p.numel() for p in resnet18((3, 32, 32), 1000).parameters())
    11689512
    """
    return _convolutional("resnet18", input_shape, classes, dropout, drop_path)


def resnet34(
    input_shape: Sequence[int], classes: int, *, dropout: Dropout = 0.0, drop_path: DropPath = 0.0
) -> nn.Module:
    """ResNet-34 (He et al. 2016, arXiv 1512.03385): as `resnet18`, with 16 blocks."""
    return _convolutional("resnet34", input_shape, classes, dropout, drop_path)


def resnet50(
    input_shape: Sequence[int], classes: int, *, dropout: Dropout = 0.0, drop_path: DropPath = 0.0
) -> nn.Module:
    """ResNet-50 (He et al. 2016, arXiv 1512.03385): 16 bottleneck blocks, with the stride in the 3x3 convolution."""
    return _convolutional("resnet50", input_shape, classes, dropout, drop_path)


def mobilenet_v2(
    input_shape: Sequence[int], classes: int, *, dropout: Dropout = 0.0, drop_path: DropPath = 0.0
) -> nn.Module:
    """MobileNetV2 at width 1 (Sandler et al. 2018, arXiv 1801.04381)."""
    return _convolutional("mobilenet-v2", input_shape, classes, dropout, drop_path)


def mobilenet_v3_large(
    input_shape: Sequence[int], classes: int, *, dropout: Dropout = 0.0, drop_path: DropPath = 0.0
) -> nn.Module:
    """MobileNetV3-Large at width 1 (Howard et al. 2019, arXiv 1905.02244)."""
    return _convolutional("mobilenet-v3-large", input_shape, classes, dropout, drop_path)


def efficientnet_b0(
    input_shape: Sequence[int], classes: int, *, dropout: Dropout = 0.0, drop_path: DropPath = 0.0
) -> nn.Module:
    """EfficientNet-B0 (Tan and Le 2019, arXiv 1905.11946); they train it with `dropout` and `drop_path` 0.2."""
    return _convolutional("efficientnet-b0", input_shape, classes, dropout, drop_path)


def vit_b_16(
    input_shape: Sequence[int],
    classes: int,
    *,
    patch: Patch = 16,
    dropout: Dropout = 0.0,
    drop_path: DropPath = 0.0,
) -> nn.Module:
    """ViT-B/16 (Dosovitskiy et al. 2021, arXiv 2010.11929): 12 layers of 768 features on patches of 16x16.

    It takes images whose sides are multiples of `patch`, at least 4 patches each, and has one position embedding a
    patch. Published weights are of patches of 16x16. Raises `ConfigError` without timm, and for other sizes.
    """
    return _transformer("vit-b-16", input_shape, classes, patch, dropout, drop_path)


def vit_tiny(
    input_shape: Sequence[int],
    classes: int,
    *,
    patch: Patch = 16,
    dropout: Dropout = 0.0,
    drop_path: DropPath = 0.0,
) -> nn.Module:
    """ViT-Tiny (Touvron et al. 2021, arXiv 2012.12877): as `vit_b_16`, with 192 features and 3 heads.

    >>> sum(p.numel() for p in vit_tiny((3, 224, 224), 1000).parameters())
    5717416
    """
    return _transformer("vit-tiny", input_shape, classes, patch, dropout, drop_path)
