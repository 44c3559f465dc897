"""Weights of the classes in the training loss: the setting `task.class_weights` of tasks with labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.dataset_info import DatasetInfo
from fedlens.tasks.task import Task

ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
ClassWeightsSetting = Annotated[
    Literal["none", "balanced"] | list[Annotated[float, Field(ge=0, allow_inf_nan=False)]],
    Field(
        description="weights of the classes in the training loss. none; balanced: inversely to how often each "
        "class occurs at the client; or a list with one weight per class"
    ),
]


@dataclass(frozen=True, kw_only=True)
class ClassWeighted(Task):
    """A task whose training loss may weigh the classes.

    Args:
        class_weights: "none", "balanced", or one number a class; see `client_weights`.
    """

    class_weights: ClassWeights = "none"

    @property
    def weighs(self) -> bool:
        """Whether classes are weighed."""
        return self.class_weights != "none"

    def validate(self, info: DatasetInfo) -> None:
        """Refuses datasets of another kind, and class weights of another number of classes."""
        super().validate(info)
        if isinstance(self.class_weights, tuple) and len(self.class_weights) != len(info.classes):
            raise ConfigError(
                f"task.class_weights has {len(self.class_weights)} weights, but the dataset has "
                f"{len(info.classes)} classes",
                where="task.class_weights",
                hint="give one weight per class, in the order of the classes",
            )

    def client_weights(self, counts: Callable[[], Tensor]) -> Tensor | None:
        """float64 [classes]; of "balanced", m / (C m_c), and 0 for a class that the client does not have.

        The client has m_c labels of class c, and m of all C classes.
        """
        if isinstance(self.class_weights, tuple):
            return torch.tensor(self.class_weights, dtype=torch.float64)
        if self.class_weights == "none":
            return None
        found = counts().double()
        return torch.where(found > 0, found.sum() / (len(found) * found), 0.0)


def checked(class_weights: Literal["none", "balanced"] | list[float]) -> ClassWeights:
    """The setting as a task holds it. Raises `ConfigError` for weights of which none is above 0.

    >>> checked([1.0, 0.0])
    (1.0, 0.0)
    """
    weights = tuple(class_weights) if isinstance(class_weights, list) else class_weights
    if isinstance(weights, tuple) and not any(weights):
        raise ConfigError(
            "all weights in task.class_weights are 0, so nothing would be learned",
            where="class_weights",
            hint="give at least one weight above 0",
        )
    return weights
