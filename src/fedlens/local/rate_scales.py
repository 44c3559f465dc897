"""The learning rate of each leaf: `local.lr_scale`, factors by the names of layers (He et al. 2021, section 7.1.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fedlens.base.errors import ConfigError, nearest
from fedlens.core.modules import Loadable
from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import part, spec_of
from fedlens.local.settings import LocalSettings
from fedlens.models.freeze import parts
from fedlens.models.head import head_of

HEAD = "head"
_KEY = "local.lr_scale"


def rate_scales(
    factors: Mapping[str, float] | None, leaves: Sequence[str], head: str | None
) -> tuple[float, ...]:
    """The factor of each leaf's learning rate; empty if all have the same rate.

    Args:
        factors: by the name of a leaf, or of a layer with all its leaves. The longest matching name counts; other
            leaves have the factor 1.
        leaves: the names of the trained leaves.
        head: the name of the classifier, which the name `head` means; None if the model has none.

    Raises `ConfigError` for a name that no trained leaf has.

    >>> rate_scales({"head": 10.0, "1": 2.0, "1.bias": 3.0}, ["0.weight", "1.weight", "1.bias", "2.weight"], "2")
    (1.0, 2.0, 3.0, 10.0)
    """
    if not factors:
        return ()
    named: dict[str, float] = {}
    for name, factor in factors.items():
        path = head if name == HEAD and head is not None else name
        if not any(_within(leaf, path) for leaf in leaves):
            raise ConfigError(
                f"local.lr_scale names '{name}', but no trained weight has this name"
                if name != HEAD
                else "local.lr_scale names 'head', but the model trains no linear layer with one output a class",
                where=_KEY,
                hint=nearest(name, [*parts(leaves), *([HEAD] if head is not None else [])]),
            )
        named[path] = factor
    return tuple(_factor(leaf, named) for leaf in leaves)


def _within(leaf: str, path: str) -> bool:
    return leaf == path or leaf.startswith(f"{path}.") or not path


def _factor(leaf: str, named: Mapping[str, float]) -> float:
    fitting = [path for path in named if _within(leaf, path)]
    return named[max(fitting, key=len)] if fitting else 1.0


def module_scales(settings: LocalSettings, module: nn.Module, classes: int) -> tuple[float, ...]:
    """The factors of a module's trained leaves; see `rate_scales`."""
    if not settings.lr_scale:
        return ()
    head = head_of(module, classes)
    leaves = part(spec_of(module), "weight", trainable=True)
    return rate_scales(settings.lr_scale, leaves, None if head is None else head.prefix)


def model_scales(settings: LocalSettings, model: ModelSpec) -> tuple[float, ...]:
    """`module_scales` of a model that is not built yet."""
    return module_scales(settings, model.build(initial=False), model.classes) if settings.lr_scale else ()


def learner_scales(settings: LocalSettings, learner: Loadable) -> tuple[float, ...]:
    """`module_scales` of a module in a worker, computed once."""
    if not settings.lr_scale:
        return ()
    key = "lr_scale", *settings.lr_scale.items()
    if key not in learner.kept:
        learner.kept[key] = module_scales(settings, learner.module, learner.model.classes)
    found: tuple[float, ...] = learner.kept[key]
    return found
