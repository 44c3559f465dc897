"""A projection head in front of a model's last layer: Li, He and Song 2021 (arXiv 2103.16257), section 3.3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.base.registry import Factory, read_settings
from fedlens.models.registry import MODELS
from fedlens.models.simple import Width


def last_linear(module: nn.Module) -> tuple[str, nn.Linear] | None:
    """The name and the layer of a module's last linear layer, in order of definition; None where it has none.

    >>> last_linear(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('2', Linear(in_features=3, out_features=2, bias=True))
    """
    found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return found[-1] if found else None


def _read(given: Mapping[str, Any] | str) -> tuple[Factory, str, dict[str, Any]]:
    """Factory, name and checked settings of the model that a table, or a name alone, stands for."""
    table = {"name": given} if isinstance(given, str) else dict(given)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            "the table needs a 'name', a string",
            where="base.name",
            hint='write base = {name = "small-cnn"}',
        )
    factory = MODELS.find(name, where="base.name")
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        name = f"{Path(file).expanduser().resolve()}:{attribute}"
    return factory, name, read_settings(factory, table, "base")


def _filled(given: dict[str, Any] | str) -> dict[str, Any] | str:
    """The table with every setting in it and a whole path, so that a run's config.toml has them."""
    try:
        _, name, settings = _read(given)
    except ConfigError:
        return given  # `projection` finds the same fault, and says where it is
    return {"name": name, **settings}


def projection(
    input_shape: Sequence[int],
    classes: int,
    *,
    base: Annotated[
        dict[str, Any] | str,
        AfterValidator(_filled),
        Field(
            description='the model to which the head is added: a table such as {name = "small-cnn"}, or a name'
        ),
    ] = "small-cnn",
    hidden: Annotated[Width, Field(description="units of the head's first layer")] = 256,
    width: Annotated[Width, Field(description="output features of the head, 256 in the paper")] = 256,
) -> nn.Module:
    """A model with MOON's projection head between its encoder and its last layer.

    In place of the last linear layer of `base`, in order of definition, stand two linear layers with a ReLU between
    them, and the new last layer on what they give: encoder -> hidden -> ReLU -> width -> classes. The encoder starts
    from the weights that `base` has by itself. The paper does not say how wide the first layer is; its code takes as
    many units as there are features, too many for a convolution's.

    Raises `ConfigError` where `base` is no model, or one without a linear layer.

    >>> sum(p.numel() for p in projection((1, 28, 28), 10, base="linear", hidden=8, width=4).parameters())  # 784-8-4-10
    6366
    """
    factory, name, settings = _read(base)
    module: nn.Module = factory(input_shape, classes, **settings)
    found = last_linear(module)
    if found is None:
        raise ConfigError(
            f"the model '{name}' has no linear layer, before which the projection head would be placed",
            where="base.name",
        )
    path, last = found
    head = nn.Sequential(
        nn.Linear(last.in_features, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Linear(width, classes)
    )
    if not path:
        return head
    above, _, place = path.rpartition(".")
    setattr(module.get_submodule(above), place, head)
    return module
