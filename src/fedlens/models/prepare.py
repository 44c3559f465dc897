"""The keys of `[model]` that work on any model, and what they do to a module that a factory has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import nn

    from fedlens.core.protocol import ModelSpec


class Preparation(BaseModel):
    """The keys that work on any model. A setting of the model's own factory with the same name comes first.

    Calling it prepares a module: `ModelSpec.build` does so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    norm: Literal["batch", "group", "layer", "frozen"] | None = Field(
        None,
        description="in place of batch normalization: 'group' (groups of up to 8 channels), 'layer' (one group), "
        "'frozen' (statistics and weights stay as they are); 'batch' keeps it",
    )
    bottleneck: int | None = Field(
        None, ge=1, le=65536, description="features of a linear layer that is put before the classifier"
    )

    def __call__(self, module: nn.Module, spec: ModelSpec, initial: bool) -> nn.Module:
        """The prepared module.

        Args:
            module: as the factory made it.
            spec: what it was made from.
            initial: whether the weights matter; without, only the structure does, because a tree is loaded next.
        """
        if self.norm is not None:
            from fedlens.models.norms import with_norm

            module = with_norm(module, self.norm)
        if self.bottleneck is not None:
            from fedlens.models.head import with_bottleneck

            module = with_bottleneck(module, spec.classes, self.bottleneck)
        return module

    def table(self) -> dict[str, Any]:
        """The keys that were set, as config.toml has them."""
        return self.model_dump(exclude_defaults=True)
