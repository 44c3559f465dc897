"""Models: plain `nn.Module` factories by name, `factory(input_shape, classes, *, settings) -> nn.Module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedlens.core.errors import ConfigError
from fedlens.core.registry import INSTANCE, Entry, Factory, OwnSettings, Registry


@dataclass(frozen=True)
class ModelRegistry(Registry):
    """The table of models, which also takes what PyTorch has: classes, functions and `nn.Module` objects."""

    def find(self, name: str, where: str | None = None) -> Factory:
        """The factory of this name; one of a user's own is adapted to be called as fedlens calls it."""
        if name == INSTANCE:
            raise ConfigError(
                "the run's model was given as an object in Python, which config.toml cannot hold",
                where=where,
                hint="pass an equal object: resume(directory, model=...) or load_result(directory, model=...)",
            )
        found = super().find(name, where)
        return found if name in self.entries else self.given(found)[0]

    def given(self, thing: Any) -> tuple[Factory, str]:
        """The factory and the name of a model that was given in Python."""
        from torch import nn  # names alone are listed without PyTorch

        from fedlens.models.user_models import Instance, UserModel

        if isinstance(thing, nn.Module):
            return Instance.of(thing), INSTANCE
        if isinstance(thing, Instance):
            return thing, INSTANCE
        factory, name = super().given(thing)
        own = isinstance(thing, OwnSettings) or name.startswith("fedlens.")
        return factory if own else UserModel(thing, name), name


MODELS = ModelRegistry(
    "model",
    {
        "linear": Entry("fedlens.models.simple:linear", "multinomial logistic regression on the pixels"),
        "mlp": Entry("fedlens.models.simple:mlp", "McMahan's 2NN: two hidden layers of 200 ReLU units"),
        "small-cnn": Entry(
            "fedlens.models.simple:small_cnn", "two 3x3 convolutions for small images such as digits"
        ),
        "mcmahan-cnn": Entry(
            "fedlens.models.simple:mcmahan_cnn", "McMahan's CNN, 1,663,370 parameters at 28x28x1"
        ),
        "hsu-cnn": Entry(
            "fedlens.models.simple:hsu_cnn", "the CNN of Hsu et al. 2019, 1,756,426 parameters on CIFAR-10"
        ),
        "projection": Entry(
            "fedlens.models.projection:projection",
            "another model with MOON's projection head before its last layer",
        ),
    },
)
