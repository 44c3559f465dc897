"""The keys of `[model]` that work on any model, and what they do to a module that a factory has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from fedlens.files.caches import HUB
from fedlens.files.regular_file import too_long
from fedlens.models.weights_setting import IMAGENET, NONE, RUN, names_a_file

if TYPE_CHECKING:
    from torch import nn

    from fedlens.core.protocol import ModelSpec
    from fedlens.models.weights import InitialWeights

_WEIGHTS = ("weights", "weights_partial", "weights_sha256")


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
    classifier: bool = Field(
        True,
        strict=True,
        description="false leaves out the classifier, so that outputs are features; self-supervised tasks do so",
    )
    hidden_widths: list[Annotated[int, Field(ge=1, le=65536)]] | None = Field(
        None,
        description="units, or channels, of each hidden layer, in place of those that the model's own settings give "
        "it; for models that are one sequence of convolutions and linear layers",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="initial weights: a file (safetensors, or a state dictionary of PyTorch), a folder with "
        "config.json and model.safetensors, 'hub:OWNER/NAME' for these files of the Hugging Face Hub, 'run:DIR' for "
        "the final model of a finished run, or 'imagenet' for those that timm publishes; 'none' draws them",
    )
    weights_partial: bool = Field(
        False,
        strict=True,
        description="load weights of which fewer than half match the model, and draw the others",
    )
    weights_sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the file of weights, which is refused if it has another; a run fills it in",
    )
    freeze: str | list[str] | None = Field(
        None,
        description="what is not trained: 'backbone' (all but the classifier; of a network for segmentation or "
        "detection the classifier's body), 'all-but-last:N' (all but the last N blocks), or a list of names of layers "
        "and leaves",
    )
    cache_features: bool = Field(
        False, description="keep what the frozen part computes, so that each image goes through it once"
    )

    _initial: InitialWeights | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _without_weights(cls, keys: Any) -> Any:
        """Leaves out the keys of weights if they are 'none': a recipe starts from random weights with it."""
        if not isinstance(keys, dict) or keys.get("weights") != NONE:
            return keys
        return {name: value for name, value in keys.items() if name not in _WEIGHTS}

    @model_validator(mode="after")
    def _partial_of_something(self) -> Preparation:
        if self.weights_partial and self.weights is None:
            raise ValueError("model.weights_partial needs model.weights, the file that holds a part of them")
        return self

    @field_validator("weights")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        """The path of a file or run from the root, so that it is found again from any directory."""
        if value is None or value == IMAGENET or value.startswith(HUB):
            return value
        kind = RUN if value.startswith(RUN) else ""
        path = Path(value.removeprefix(RUN)).expanduser().absolute()
        if too_long(path / "model.safetensors" if kind else path):
            raise ValueError("the path of the weights is longer than the file system allows")
        return f"{kind}{path}"

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
        if not self.classifier:
            from fedlens.models.head import without_classifier

            module = without_classifier(module, spec.classes)
        if self.hidden_widths is not None:
            from fedlens.models.chains import resize

            resize(module, self.hidden_widths)
        if initial and self.initial_weights is not None:
            self.initial_weights.load(module, spec.classes)
        if self.freeze is not None:
            from fedlens.models.freeze import freeze

            freeze(module, self.freeze, spec.classes)
        if self.cache_features:
            from fedlens.models.freeze import split

            split(module, spec.input_shape, check=initial)
        return module

    def varied(self, **keys: Any) -> Preparation:
        """The same keys, but for the values of these."""
        changed = self.model_copy(update=keys)
        changed._initial = self.initial_weights
        return changed

    @property
    def initial_weights(self) -> InitialWeights | None:
        """The weights that the model starts from, read at the first build; None if they are drawn."""
        if self.weights is not None and self._initial is None:
            from fedlens.models.weights import InitialWeights

            self._initial = InitialWeights(self.weights, self.weights_partial, self.weights_sha256)
        return self._initial

    @classmethod
    def claims(cls, name: str, value: Any, free: bool) -> bool:
        """Whether a setting that the model's own factory takes too is one of these.

        Args:
            name: the setting.
            value: its value.
            free: whether the factory takes any name, and does not declare this one.
        """
        if name != "weights":
            return free
        return names_a_file(value) or value == NONE or (free and value == IMAGENET)

    def table(self) -> dict[str, Any]:
        """The keys that were set, as config.toml has them."""
        return self.model_dump(exclude_defaults=True)

    def structure(self) -> dict[str, Any]:
        """The keys that were set and that the structure depends on, as a model file has them."""
        return self.model_dump(exclude_defaults=True, exclude=set(_WEIGHTS))
