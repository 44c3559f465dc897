"""The focal loss of Lin et al. 2017 (arXiv 1708.02002, Eq. 4): examples that are right already weigh less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedlens.parts import Classification, ConfigError, DatasetInfo


@dataclass(frozen=True, kw_only=True)
class Focal(Classification):
    """Classification with the loss -(1 - p)^gamma log p, where p is the probability of the example's class."""

    gamma: Annotated[float, Field(ge=0, description="0 is the cross-entropy")] = 2.0

    def validate(self, info: DatasetInfo) -> None:
        """Refuses label smoothing, which this loss does not have."""
        super().validate(info)
        if self.label_smoothing:
            raise ConfigError(
                "the focal loss has no label smoothing", where="task.label_smoothing", hint="remove it"
            )

    def loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, normalize: bool = True
    ) -> Tensor:
        """The mean over the batch, or with `weights` sum w l / sum w."""
        losses = self._focal(outputs, targets)
        if weights is None:
            return losses.mean()
        each = weights.to(losses)[targets]
        return (each * losses).sum() / (each.sum().clamp(min=1e-30) if normalize else len(losses))

    @property
    def losses(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The loss of each example, so that clients can train stacked; with class weights they cannot."""
        return None if self.weighs else self._focal

    def _focal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_p = F.log_softmax(outputs, 1).gather(1, targets[:, None]).squeeze(1)
        return -((1 - log_p.exp()) ** self.gamma) * log_p
