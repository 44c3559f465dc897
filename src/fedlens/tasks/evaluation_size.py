"""The size at which images are evaluated: the setting `evaluation.size`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.tasks.task import Task

_WHERE = "evaluation.size"
Pair = tuple[int, int]  # height and width in pixels
Setting = Literal["full"] | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationSize(ABC):
    """How the outputs for a batch are made in an evaluation, and when image files are predicted."""

    @abstractmethod
    def __call__(self, task: Task, module: nn.Module, inputs: Any, targets: Any) -> Any:
        """The outputs of `module` for `inputs`, in the form of `task.outputs(module, inputs, targets)`."""

    def input_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape of one input of the module, from the stored one."""
        return tuple(stored)


@dataclass(frozen=True)
class Full(EvaluationSize):
    """The stored size of the images."""

    def __call__(self, task: Task, module: nn.Module, inputs: Any, targets: Any) -> Any:
        """The forward pass."""
        return task.outputs(module, inputs, targets)


FULL = Full()


@dataclass(frozen=True)
class Resized(EvaluationSize):
    """Images are resized bilinearly to `size`, and the outputs brought back to the stored size by `Task.restored`.

    The result is measured against the targets in their stored size. Images of this size are not changed.

    Args:
        size: height and width in pixels.
    """

    size: Pair

    def input_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """(C, H, W) with the height and width of `size`."""
        return (*stored[:-2], *self.size)

    def __call__(self, task: Task, module: nn.Module, inputs: Any, targets: Any) -> Any:
        """The outputs for the resized images, in the stored size."""
        stored: Pair = (inputs.shape[-2], inputs.shape[-1])
        if stored == self.size:
            return task.outputs(module, inputs, targets)
        scaled = nn.functional.interpolate(inputs, self.size, mode="bilinear", align_corners=False)
        return task.restored(task.outputs(module, scaled, targets), self.size, stored)


@dataclass(frozen=True)
class Windows(EvaluationSize):
    """A window slides over each image, and where windows overlap, the logit of a pixel is the mean of theirs.

    Windows start every `stride` pixels from the top and the left; the last one ends at the border.

    Args:
        window, stride: height and width in pixels.

    >>> Windows((4, 4), (3, 3)).starts((8, 4))
    ([0, 3, 4], [0])
    """

    window: Pair
    stride: Pair

    def __call__(self, task: Task, module: nn.Module, inputs: Any, targets: Any) -> Any:
        """The logits [n, classes, H, W]: for each window position one forward pass of the whole batch."""
        stored: Pair = (inputs.shape[-2], inputs.shape[-1])
        height, width = self.window
        rows, columns = self.starts(stored)
        if len(rows) == len(columns) == 1:
            return task.outputs(module, inputs, targets)
        total: Tensor | None = None
        number = torch.zeros(stored, device=inputs.device)
        for top in rows:
            for left in columns:
                at = (..., slice(top, top + height), slice(left, left + width))
                outputs = task.outputs(module, inputs[at], None)
                if total is None:
                    total = outputs.new_zeros(*outputs.shape[:2], *stored)
                total[at] += outputs
                number[at] += 1
        assert total is not None
        return total.div_(number.to(total.dtype))

    def starts(self, stored: Pair) -> tuple[list[int], list[int]]:
        """The first rows and the first columns of the windows in images of this height and width."""
        rows, columns = (
            [*range(0, length - window, stride), length - window]
            for length, window, stride in zip(stored, self.window, self.stride, strict=True)
        )
        return rows, columns


def evaluation_size(
    setting: Setting, task: Task, input_shape: Sequence[int], features: bool = False
) -> EvaluationSize:
    """The object for the setting `evaluation.size`.

    Args:
        setting: "full", [height, width], or a table of `window` and `stride`, each a number or [height, width].
        task: what the model is trained for.
        input_shape: (C, H, W) of the stored images.
        features: whether models take kept features in place of images.

    Raises `ConfigError` if the task cannot be evaluated so, if a window is larger than the images, or if windows
    leave gaps between them.

    >>> from fedlens.tasks.segmentation import Segmentation
    >>> evaluation_size({"window": 64, "stride": [32, 64]}, Segmentation(), (3, 96, 128))
    Windows(window=(64, 64), stride=(32, 64))
    """
    if setting == "full":
        return FULL
    kind = "windows" if isinstance(setting, Mapping) else "resized"
    if kind not in task.sizes:
        others = sorted({"resized", "windows"} & task.sizes)
        raise ConfigError(
            f"models for {task.kind} are not evaluated {_HOW[kind]}",
            where=_WHERE,
            hint="set evaluation.size = 'full'" + (", or [height, width]" if "resized" in others else ""),
        )
    if features:
        raise ConfigError(
            "features of images are kept at the stored size, and have no other",
            where=_WHERE,
            hint="set evaluation.size = 'full', or model.cache_features = false",
        )
    if not isinstance(setting, Mapping):
        height, width = setting
        return Resized((int(height), int(width)))
    window, stride = (_pair(setting[name]) for name in ("window", "stride"))
    stored: Pair = (input_shape[-2], input_shape[-1])
    for name, most, of, other in (
        ("window", stored, "the images are", "at most the size of the images"),
        ("stride", window, "the window is", "at most the size of the window"),
    ):
        pair = window if name == "window" else stride
        if pair[0] > most[0] or pair[1] > most[1]:
            raise ConfigError(
                f"the {name} is {pair[0]}x{pair[1]} pixels (height x width), but {of} {most[0]}x{most[1]}",
                where=f"{_WHERE}.{name}",
                hint=f"make it {other}"
                + ("" if name == "window" else ", or pixels between windows are left out"),
            )
    return Windows(window, stride)


_HOW = {"resized": "at another size than the stored one", "windows": "in windows"}


def _pair(value: int | Sequence[int]) -> Pair:
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)
