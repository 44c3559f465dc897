"""Weights of YOLOv5's authors, release 4.0 and 5.0: read without their code, and called as fedlens calls them.

Their files are pickles of whole modules. PyTorch's restricted unpickler reads them here with an empty class in place of
each class in `CLASSES`, so no code of the file or of the authors runs. The names of the leaves are those of their
published files; no code of theirs is in this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

_MODEL, _LAYERS = "models.yolo.Model", "torch.nn.modules"
CLASSES = (
    _MODEL, "models.yolo.Detect", "models.common.Conv", "models.common.Focus", "models.common.Bottleneck",
    "models.common.C3", "models.common.SPP", "models.common.Concat", f"{_LAYERS}.conv.Conv2d",
    f"{_LAYERS}.batchnorm.BatchNorm2d", f"{_LAYERS}.activation.SiLU", f"{_LAYERS}.pooling.MaxPool2d",
    f"{_LAYERS}.upsampling.Upsample", f"{_LAYERS}.container.Sequential", f"{_LAYERS}.container.ModuleList",
    f"{_LAYERS}.linear.Identity", "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
)  # fmt: skip
"""The classes and functions that such a file names besides tensors and containers."""
_PLACES = {
    "0.conv": "encoder.stem.layer", "1": "encoder.stages.0.0", "2": "encoder.stages.0.1", "3": "encoder.stages.1.0",
    "4": "encoder.stages.1.1", "5": "encoder.stages.2.0", "6": "encoder.stages.2.1", "7": "encoder.stages.3.0",
    "8": "encoder.stages.3.1", "9": "encoder.stages.3.2", "10": "neck.reduce1", "13": "neck.top_down1",
    "14": "neck.reduce2", "17": "neck.top_down2", "18": "neck.down1", "20": "neck.bottom_up1", "21": "neck.down2",
    "23": "neck.bottom_up2", "24.m": "head",
}  # fmt: skip
_POOLING = {"cv1": "reduce", "cv2": "join"}
_CROSS_STAGE = {"cv1": "through", "cv2": "around", "cv3": "join", "m": "bottlenecks"}
_BOTTLENECK = {"cv1": "conv1", "cv2": "conv2"}
_LEAF = re.compile(r"model\.(0\.conv|24\.m|\d+)\.(.+)")
_STEM, _HEAD = "model.0.conv.conv.weight", "model.24.m.0.weight"


class StandIn:
    """An object without code, in place of one that a file names: it takes any arguments and keeps its attributes."""

    name: ClassVar[str]

    def __new__(cls, *_: Any) -> StandIn:  # a pickle calls it with the arguments of the class or function
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            vars(self).update(state)


def stand_ins() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """A class in place of each of `CLASSES`, for `torch.serialization.safe_globals`."""
    return [(type("StandIn", (StandIn,), {"name": name}), name) for name in CLASSES]


def leaves_of(value: object) -> object:
    """The leaves by name of a stand-in for a YOLOv5 network; any other value as it is."""
    if not (isinstance(value, StandIn) and type(value).name == _MODEL):
        return value
    return {name: leaf for name, leaf in _leaves(value, "", set()) if isinstance(leaf, Tensor)}


def foreign(values: Iterable[object]) -> str | None:
    """The name of the first stand-in for a layer that is not a YOLOv5 network by itself; None without one."""
    names = (type(value).name for value in values if isinstance(value, StandIn))
    return next((name for name in names if name != _MODEL and not name.startswith("numpy.")), None)


def _leaves(module: StandIn, prefix: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """The parameters and buffers of a module and of those inside it, each module once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for kind in ("_parameters", "_buffers", "_modules"):
        members = vars(module).get(kind)
        for name, value in members.items() if isinstance(members, Mapping) else ():
            if isinstance(value, StandIn):
                yield from _leaves(value, f"{prefix}{name}.", seen)
            else:
                yield f"{prefix}{name}", value


def renamed(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The leaves of the authors' network by the names of `fedlens.models.yolov5.detector`; other leaves as they are.

    >>> import torch
    >>> theirs = {"model.0.conv.conv.weight": torch.zeros(8, 12, 3, 3), "model.24.m.0.weight": torch.zeros(18, 8, 1, 1)}
    >>> list(renamed({**theirs, "model.23.m.0.cv1.bn.bias": torch.zeros(8)}))
    ['encoder.stem.layer.conv.weight', 'head.0.weight', 'neck.bottom_up2.bottlenecks.0.conv1.norm.bias']
    """
    if not {_STEM, _HEAD} <= tensors.keys():
        return tensors
    return {_renamed(name): _unshuffled(value) if name == _STEM else value for name, value in tensors.items()}


def _renamed(name: str) -> str:
    match = _LEAF.fullmatch(name)
    if match is None or match[1] not in _PLACES:
        return name
    path = match[2].split(".")
    path[0] = (_POOLING if match[1] == "8" else _CROSS_STAGE).get(path[0], path[0])
    if path[0] == "bottlenecks" and len(path) > 2:
        path[2] = _BOTTLENECK.get(path[2], path[2])
    return ".".join([_PLACES[match[1]], *("norm" if step == "bn" else step for step in path)])


def _unshuffled(weight: Tensor) -> Tensor:
    """The stem's weight [o, 4 c, h, w] with its inputs by channel, row, column in place of column, row, channel."""
    if weight.dim() != 4 or weight.shape[1] % 4:
        return weight
    outputs, _, *kernel = weight.shape
    return weight.reshape(outputs, 2, 2, -1, *kernel).permute(0, 3, 2, 1, 4, 5).flatten(1, 3)
