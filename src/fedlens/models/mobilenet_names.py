"""The names of MobileNetV2's and MobileNetV3's leaves: timm's in torchvision's words."""

from __future__ import annotations

_STAGES = (1, 2, 3, 4, 3, 3, 1)  # blocks of each stage of MobileNetV2
_ENDS = {"conv_stem": "0.0", "bn1": "0.1", "conv_head": "18.0", "bn2": "18.1"}
_FIRST = {"conv_dw": "0.0", "bn1": "0.1", "conv_pw": "1", "bn2": "2"}  # without expansion
_LATER = {"conv_pw": "0.0", "bn1": "0.1", "conv_dw": "1.0", "bn2": "1.1", "conv_pwl": "2", "bn3": "3"}


def mobilenet_v2_leaf(name: str) -> str | None:
    """torchvision's name of a leaf of timm's `mobilenetv2_100`; its own names stay, None for any other.

    timm counts stages and the blocks of each, torchvision all blocks; both have the same layers in the same order.

    >>> mobilenet_v2_leaf("conv_stem.weight"), mobilenet_v2_leaf("blocks.2.1.bn3.bias")
    ('features.0.0.weight', 'features.5.conv.3.bias')
    >>> mobilenet_v2_leaf("features.5.conv.3.bias"), mobilenet_v2_leaf("classifier.bias")
    ('features.5.conv.3.bias', None)
    """
    path = name.split(".")
    if path[0] == "features":
        return name
    if len(path) == 2 and path[0] in _ENDS:
        return f"features.{_ENDS[path[0]]}.{path[1]}"
    if len(path) != 5 or path[0] != "blocks" or not (path[1].isdecimal() and path[2].isdecimal()):
        return None
    stage, block, layer, leaf = int(path[1]), int(path[2]), path[3], path[4]
    layers = _LATER if stage else _FIRST
    if stage >= len(_STAGES) or block >= _STAGES[stage] or layer not in layers:
        return None
    return f"features.{1 + sum(_STAGES[:stage]) + block}.conv.{layers[layer]}.{leaf}"


_STAGES_V3 = (1, 2, 3, 4, 2, 3)  # of MobileNetV3-Large, before the last convolution
_SQUEEZED = (2, 4, 5)  # the stages whose blocks squeeze and excite
_ENDS_V3 = {"conv_stem": "0.0", "bn1": "0.1", "blocks.6.0.conv": "16.0", "blocks.6.0.bn1": "16.1"}
_FIRST_V3 = {"conv_dw": "0.0", "bn1": "0.1", "conv_pw": "1.0", "bn2": "1.1"}  # without expansion
_EXPANDED_V3 = {"conv_pw": "0.0", "bn1": "0.1", "conv_dw": "1.0", "bn2": "1.1"}
_PLAIN_V3 = {**_EXPANDED_V3, "conv_pwl": "2.0", "bn3": "2.1"}
_SQUEEZED_V3 = {
    **_EXPANDED_V3, "se.conv_reduce": "2.fc1", "se.conv_expand": "2.fc2", "conv_pwl": "3.0", "bn3": "3.1"
}  # fmt: skip


def mobilenet_v3_leaf(name: str) -> str | None:
    """torchvision's name of a leaf of timm's `mobilenetv3_large_100`; its own names stay, None for any other.

    timm's layers after the global pooling have no place among torchvision's features.

    >>> mobilenet_v3_leaf("conv_stem.weight"), mobilenet_v3_leaf("blocks.2.1.se.conv_reduce.bias")
    ('features.0.0.weight', 'features.5.block.2.fc1.bias')
    >>> mobilenet_v3_leaf("features.16.1.bias"), mobilenet_v3_leaf("conv_head.weight")
    ('features.16.1.bias', None)
    """
    layer, _, leaf = name.rpartition(".")
    if layer.startswith("features."):
        return name
    if layer in _ENDS_V3:
        return f"features.{_ENDS_V3[layer]}.{leaf}"
    path = layer.split(".", 3)
    if len(path) != 4 or path[0] != "blocks" or not (path[1].isdecimal() and path[2].isdecimal()):
        return None
    stage, block = int(path[1]), int(path[2])
    if stage >= len(_STAGES_V3) or block >= _STAGES_V3[stage]:
        return None
    layers = _FIRST_V3 if stage == 0 else _SQUEEZED_V3 if stage in _SQUEEZED else _PLAIN_V3
    if path[3] not in layers:
        return None
    return f"features.{1 + sum(_STAGES_V3[:stage]) + block}.block.{layers[path[3]]}.{leaf}"
