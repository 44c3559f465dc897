"""Chains: models whose layers form one sequence, so that the units of a hidden layer can be permuted and added to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fedlens.base.errors import ConfigError
from fedlens.models.stages import pointwise, traced

_KEY = "model.name"
_HINT = "choose 'mlp', 'small-cnn', 'mcmahan-cnn', 'hsu-cnn', 'vgg9' or another chain of convolutions and linear layers"
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_POOLING_FUNCTIONS = {
    functional.max_pool2d, functional.avg_pool2d, functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d,
    torch.max_pool2d,
}  # fmt: skip


def chain_layers(module: nn.Module) -> list[str]:
    """The names of the layers with weights of a chain, in the order of the forward pass.

    A chain has convolutions and linear layers, and between them pointwise functions, pooling, dropout and flattening.

    Raises `ConfigError` for any other model: with a normalization, a residual sum, a recurrence, weights that are not
    trained, a layer that is used twice, or a grouped convolution. The message names the module.

    >>> chain_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)))
    ['0', '3']
    """
    modules = dict(module.named_modules())
    inside = [name for name in modules if name] or [""]
    graph = traced(module, inside, "the model is not a chain of layers", _KEY, _HINT)
    found: list[str] = []
    flat, nodes = False, list(graph.nodes)
    for before, node in zip([None, *nodes], nodes, strict=False):
        at = modules.get(str(node.target)) if node.op == "call_module" else None
        if node.op != "placeholder" and node.all_input_nodes != [before]:
            raise _refused(node, at, "takes more than the output of the layer before it")
        if at is not None and type(at) in (nn.Conv2d, nn.Linear):
            _check_layer(node, at, flat, found)
            found.append(str(node.target))
        flat = flat or type(at) is nn.Linear or _flattens(node, at)
        if not _in_chain(node, at, modules):
            raise _refused(node, at, "is no convolution or linear layer, and no function of one unit")
    own = {f"{name}.{leaf}" for name in found for leaf in ("weight", "bias")}
    if other := [name for name in module.state_dict() if name not in own]:
        raise _not_a_chain(f"'{other[0]}' belongs to no convolution or linear layer")
    if tied := [name for name in module.state_dict() if name not in dict(module.named_parameters())]:
        raise _not_a_chain(f"'{tied[0]}' is the same weights as those of a layer before it")
    if held := [name for name, weight in module.named_parameters() if not weight.requires_grad]:
        raise ConfigError(
            f"'{held[0]}' is not trained, but the units of all layers have to be",
            where="model.freeze",
            hint="remove model.freeze",
        )
    return found


def widths(module: nn.Module) -> list[int]:
    """The number of units, or channels, of each hidden layer of a chain.

    >>> widths(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    [8]
    """
    return [len(module.get_submodule(name).get_parameter("weight")) for name in chain_layers(module)[:-1]]


def resize(module: nn.Module, hidden: Sequence[int]) -> None:
    """Gives the hidden layers of a chain these widths, in place; layers that change get new initial weights.

    Raises `ConfigError` for a model that is not a chain, or has another number of hidden layers.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    >>> resize(net, [5])
    >>> {name: tuple(weight.shape) for name, weight in net.named_parameters() if name.endswith("weight")}
    {'0.weight': (5, 1, 3, 3), '2.weight': (3, 20)}
    """
    names = chain_layers(module)
    if len(hidden) != len(names) - 1:
        raise ConfigError(
            f"hidden_widths has {len(hidden)} numbers, but the model has {len(names) - 1} hidden layers: "
            + (", ".join(names[:-1]) or "none"),
            where="model.hidden_widths",
            hint="give one number for each of them",
        )
    outputs = [len(module.get_submodule(name).get_parameter("weight")) for name in names]
    for at, name in enumerate(names):
        old = module.get_submodule(name)
        assert isinstance(old, nn.Conv2d | nn.Linear)
        inputs, out = old.weight.shape[1], hidden[at] if at < len(hidden) else outputs[-1]
        if at:
            inputs = inputs // outputs[at - 1] * hidden[at - 1]
        if (out, inputs) != tuple(old.weight.shape[:2]):
            module.set_submodule(name, _like(old, inputs, out))


def _like(old: nn.Conv2d | nn.Linear, inputs: int, outputs: int) -> nn.Module:
    """A new layer of this kind with other numbers of inputs and outputs."""
    more: dict[str, Any] = {
        "bias": old.bias is not None,
        "device": old.weight.device,
        "dtype": old.weight.dtype,
    }
    if isinstance(old, nn.Linear):
        return nn.Linear(inputs, outputs, **more)
    more |= {
        "kernel_size": old.kernel_size,
        "stride": old.stride,
        "padding": old.padding,
        "dilation": old.dilation,
    }
    return nn.Conv2d(inputs, outputs, padding_mode=old.padding_mode, **more)


def _check_layer(node: fx.Node, layer: nn.Module, flat: bool, found: Sequence[str]) -> None:
    if str(node.target) in found:
        raise _refused(node, layer, "is used twice")
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        raise _refused(node, layer, "has groups, so its units do not see all units before it")
    if isinstance(layer, nn.Linear) and not flat and found:
        raise _refused(node, layer, "takes the output of a convolution that is not flattened")


def _in_chain(node: fx.Node, at: nn.Module | None, modules: Mapping[str, nn.Module]) -> bool:
    if node.op in ("placeholder", "output") or type(at) in (nn.Conv2d, nn.Linear, *_POOLING):
        return True
    return node.target in _POOLING_FUNCTIONS or _flattens(node, at) or pointwise(node, dict(modules))


def _flattens(node: fx.Node, at: nn.Module | None) -> bool:
    """Whether a node flattens all but the batch."""
    if isinstance(at, nn.Flatten):
        return (at.start_dim, at.end_dim) == (1, -1)
    named = node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten")
    given = [*node.args[1:], *node.kwargs.values()]
    return bool(named and given in ([1], [1, -1]))


def _refused(node: fx.Node, at: nn.Module | None, why: str) -> ConfigError:
    if at is not None:
        return _not_a_chain(f"'{node.target}' ({type(at).__name__}) {why}")
    return _not_a_chain(f"'{node.name}' in the forward pass {why}")


def _not_a_chain(why: str) -> ConfigError:
    return ConfigError(f"the model is not a chain of layers: {why}", where=_KEY, hint=_HINT)
