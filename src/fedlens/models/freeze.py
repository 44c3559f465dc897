"""Freezing: which leaves of a model are not trained, and which of its layers stay in evaluation mode."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.frozen import FrozenSplit, hold
from fedlens.core.random import random_state_kept
from fedlens.models.backbone import WithBackbone, backbone_of
from fedlens.models.head import head_of

_KEY, _CACHE = "model.freeze", "model.cache_features"


def freeze(module: nn.Module, what: str | Sequence[str], classes: int) -> None:
    """Freezes a part of a module: its weights are not trained, and its layers stay in evaluation mode.

    Args:
        module: the module; changed in place.
        what: "backbone", all but the classifier, with its bottleneck, or the submodule that a `WithBackbone` declares;
            "all-but-last:N", all but the last N `blocks`; or names. A name stands for the leaf or the layer of that
            name and all that is inside it.
        classes: the outputs of the classifier.

    Raises `ConfigError` if nothing is frozen, or nothing is left to train.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout(), nn.Flatten(), nn.Linear(2, 3))
    >>> freeze(net, "backbone", classes=3)
    >>> [name for name, weight in net.named_parameters() if weight.requires_grad], net.train()[1].training
    (['3.weight', '3.bias'], False)
    """
    leaves = [name for name, _ in module.named_parameters()]
    backbone = backbone_of(module)
    if what == "backbone" and backbone is not None:
        frozen, still = _named(module, leaves, [backbone])
    elif what == "backbone":
        frozen, still = _backbone(module, leaves, classes)
    elif isinstance(what, str):
        frozen, still = _all_but_last(module, leaves, what)
    else:
        frozen, still = _named(module, leaves, what)
    for name, weight in module.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in module.parameters()):
        raise ConfigError(
            "every weight of the model is frozen, so nothing would be trained",
            where=_KEY,
            hint="freeze fewer layers",
        )
    for name, layer in module.named_modules():
        if name in still:
            hold(layer)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.") or not prefix


def _backbone(module: nn.Module, leaves: Sequence[str], classes: int) -> tuple[set[str], set[str]]:
    head = head_of(module, classes)
    if head is None:
        raise ConfigError(
            f"freeze = 'backbone' trains the classifier, but the model has no linear layer with {classes} outputs",
            where=_KEY,
            hint="take 'all-but-last:1', or a list of names",
        )
    last = head.prefix
    frozen = {name for name in leaves if not _within(name, last)}
    if not frozen:
        raise ConfigError(
            "freeze = 'backbone' freezes nothing, because the classifier is all of the model",
            where=_KEY,
            hint="remove it, or choose a model with layers before it",
        )
    return frozen, {name for name, _ in module.named_modules() if not _within(name, last)}


def blocks(module: nn.Module) -> list[str]:
    """The names of a model's blocks: its direct children that hold parameters, in order of definition.

    A child that is an `nn.Sequential` or `nn.ModuleList` counts as its own children do, and so does the only child.

    >>> blocks(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(2, 1))))
    ['0', '2.0', '2.1']
    """
    return _blocks(module, "")


def _blocks(module: nn.Module, path: str) -> list[str]:
    children = [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]
    found: list[str] = []
    for name, child in children:
        opened = type(child) in (nn.Sequential, nn.ModuleList) or len(children) == 1
        found += (_blocks(child, name) if opened else []) or [name]
    return found


def _all_but_last(module: nn.Module, leaves: Sequence[str], what: str) -> tuple[set[str], set[str]]:
    form = re.fullmatch(r"all-but-last:(\d+)", what)
    if form is None:
        raise ConfigError(
            f"freeze is '{what}', but must be 'backbone', 'all-but-last:N' or a list of names",
            where=_KEY,
            hint=f"write freeze = ['{what}'] to freeze the layer of that name",
        )
    kept, found = int(form[1]), blocks(module)
    if not 0 < kept < len(found):
        what_for = "trains nothing" if not kept else "freezes nothing"
        raise ConfigError(
            f"'{what}' {what_for}: the model has {len(found)} block{'s' if len(found) != 1 else ''} with parameters",
            where=_KEY,
            hint=f"take 1 to {len(found) - 1}"
            if len(found) > 1
            else "choose another model, or do not freeze it",
        )
    trained = found[-kept:]
    frozen = {name for name in leaves if not any(_within(name, block) for block in trained)}
    still: set[str] = set()
    for (
        name,
        _,
    ) in module.named_modules():  # in order of definition: what comes before the first trained block
        if name == trained[0]:
            break
        if not any(_within(block, name) for block in trained):
            still.add(name)
    return frozen, still


def _named(module: nn.Module, leaves: Sequence[str], what: Sequence[str]) -> tuple[set[str], set[str]]:
    if not what:
        raise ConfigError("freeze is an empty list", where=_KEY, hint="name layers, or remove it")
    state = list(module.state_dict())
    for name in what:
        if not name or not any(_within(leaf, name) for leaf in state):
            raise ConfigError(
                f"freeze names '{name}', but no layer with weights and no leaf has this name",
                where=_KEY,
                hint=nearest(name, parts(state)),
            )
    frozen = {leaf for leaf in leaves if any(_within(leaf, name) for name in what)}
    return frozen, {
        path for path, _ in module.named_modules() if path and any(_within(path, n) for n in what)
    }


def parts(leaves: Sequence[str]) -> list[str]:
    """All names that stand for one of these leaves: their own, and those of the layers around them.

    >>> parts(["0.conv.weight", "1.bias"])
    ['0', '0.conv', '0.conv.weight', '1', '1.bias']
    """
    names = {".".join(leaf.split(".")[: k + 1]) for leaf in leaves for k in range(leaf.count(".") + 1)}
    return sorted(names)


def split(module: nn.Module, input_shape: Sequence[int], check: bool = True) -> FrozenSplit:
    """Lets the module take the features of its frozen part in place of images; see `fedlens.base.frozen.FrozenSplit`.

    Args:
        module: the module, with its frozen part; its forward pass is replaced.
        input_shape: the shape of one image.
        check: whether to compare both ways on two images; without weights there is nothing to compare.

    Raises `ConfigError` unless all that is trained comes after all that is frozen.
    """
    trained = [name for name, weight in module.named_parameters() if weight.requires_grad]
    if len(trained) == len(list(module.parameters())):
        raise ConfigError(
            "cache_features keeps what the frozen part of the model computes, but nothing is frozen",
            where=_CACHE,
            hint="set model.freeze = 'backbone'",
        )
    made = FrozenSplit(module, input_shape, _last_layers(module, trained))
    if check and not _same(made):
        del module.__dict__["forward"]
        raise _not_last()
    return made


def _last_layers(module: nn.Module, trained: Sequence[str]) -> list[str]:
    """The layers from the first trained one on: the smallest layer around all of them, or the end of a Sequential."""
    paths = [name.split(".")[:-1] for name in trained]
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    around = ".".join(paths[0][:depth])
    inner = module.get_submodule(around)
    if type(inner) is not nn.Sequential:
        if not around:
            raise _of_several_layers() if isinstance(module, WithBackbone) else _not_last()
        return [around]
    names = [f"{around}.{name}" if around else name for name, _ in inner.named_children()]
    first = next(k for k, name in enumerate(names) if any(_within(leaf, name) for leaf in trained))
    return names[first:]


def _same(made: FrozenSplit) -> bool:
    """Whether features give the same outputs as images do, and are the same in training mode."""
    module = made.module
    modes = [(layer, layer.training) for layer in module.modules()]
    statistics = [(buffer, buffer.clone()) for buffer in module.buffers()]
    some = next(module.parameters())
    images = torch.rand(2, *made.input_shape, generator=torch.Generator().manual_seed(0)).to(some)
    try:
        with torch.no_grad(), random_state_kept(some.device):
            module.train()
            training = made.features(images)
            module.eval()
            features = made.features(images)
            if tuple(features.shape[1:]) == made.input_shape or len(features) != 2:
                return False
            expected, found = made.plain(images), module(features)
        return torch.equal(training, features) and torch.allclose(expected, found, rtol=1e-5, atol=1e-6)
    except Exception:  # another way through the model, which the features do not take
        return False
    finally:
        for buffer, value in statistics:
            buffer.copy_(value)
        for layer, mode in modes:
            layer.training = mode


def _not_last() -> ConfigError:
    return ConfigError(
        "cache_features needs a model whose trained part follows its frozen part, up to the output",
        where=_CACHE,
        hint="set model.freeze = 'backbone', or remove model.cache_features",
    )


def _of_several_layers() -> ConfigError:
    return ConfigError(
        "cache_features keeps the output of one layer, but what follows the backbone of this network takes features of "
        "several layers",
        where=_CACHE,
        hint="remove model.cache_features",
    )
