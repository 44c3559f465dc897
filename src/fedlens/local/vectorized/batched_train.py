"""Local training of one client, or of several clients as one computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fedlens.base.errors import FedlensError, out_of_memory, told
from fedlens.core.arithmetic import lays_out_channels_last
from fedlens.core.protocol import Call, Obstacle, Outcome, Trial
from fedlens.core.tree import tree_of
from fedlens.local.rules import ClientRule
from fedlens.local.training import Train
from fedlens.local.vectorized.support import footprint, obstacle
from fedlens.local.vectorized.train_group import train_together


@dataclass(frozen=True)
class BatchedTrain(Train):
    """`Train` as a `BatchedOp`, which algorithms offer to engines."""

    def together(self, calls: Sequence[Call]) -> Sequence[Outcome | BaseException]:
        """Trains several clients at once; see `fedlens.local.vectorized.train_group`.

        An error of the common computation names the client rule, which may declare `stackable` by mistake.
        """
        try:
            return train_together(self, calls)
        except Exception as error:
            if self.rule.plain or isinstance(error, FedlensError) or out_of_memory(error):
                raise
            raise RuntimeError(f"with {self.rule.called}: {told(error)}") from error

    def obstacle(self) -> Obstacle | None:
        """The reason against training several clients at once; None if there is none."""
        return obstacle(self)

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The approximate bytes of each client; see `fedlens.local.vectorized.support.footprint`."""
        return footprint(self, device, largest, data)

    def trial(self, steps: int) -> Trial:
        """Plain training of this number of steps."""
        settings = self.settings.model_copy(update={"steps": steps, "epochs": None, "stragglers": 0.0})
        plain = replace(self, settings=settings, rule=ClientRule(), normalized=False, keep_optimizer=False)
        model = self.model.build(initial=False)
        convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
        # A small rate, so that no weights diverge.
        return Trial(
            plain, {"model": tree_of(model), "lr": 1e-9}, convolutions, lays_out_channels_last(model)
        )
