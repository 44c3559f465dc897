"""A model cut into parts that run one after the other, at a client and at the server, for split learning."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from fedlens.base.errors import ConfigError, nearest
from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import part, spec_of

_KEY = "algorithm.cut"
# The name of a layer in settings; those of a sequence are numbers.
LayerName = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Identity, _DropoutNd,
)  # fmt: skip
_FUNCTIONS = {
    functional.relu, functional.relu_, functional.relu6, functional.leaky_relu, functional.leaky_relu_, functional.elu,
    functional.elu_, functional.selu, functional.selu_, functional.celu, functional.gelu, functional.silu,
    functional.mish, functional.sigmoid, functional.tanh, functional.hardswish, functional.hardsigmoid,
    functional.hardtanh, functional.softplus, torch.relu, torch.relu_, torch.sigmoid, torch.sigmoid_, torch.tanh,
    torch.tanh_,
}  # fmt: skip
_METHODS = {"relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_"}


@dataclass(frozen=True)
class Stage:
    """One part of a model, as the `wrapper` of a `ModelSpec`: the part between two cuts, or at an end.

    Attributes:
        cuts: the names of the layers after which the model is cut, in order.
        at: the number of the part, from 0 to `len(cuts)`.
        before: the wrapper of the whole model, if it has one.
    """

    cuts: tuple[str, ...]
    at: int
    before: Any = None

    def __call__(self, module: nn.Module, model: ModelSpec) -> nn.Module:
        """The part of this module, with the same layers under the same names."""
        whole = module if self.before is None else self.before(module, model)
        return cut(whole, self.cuts)[self.at]


def stages(model: ModelSpec, *cuts: str) -> list[ModelSpec]:
    """The parts of a model, as models: one more than there are cuts.

    Args:
        model: the whole model.
        cuts: the names of the layers after which it is cut, in the order of the forward pass.

    Raises `ConfigError` as `cut` does. Leaves have the names that they have in the whole model.

    >>> from fedlens.models.simple import mlp
    >>> lower, upper = stages(ModelSpec(mlp, "mlp", {}, (1, 8, 8), 10, seed=0), "1")
    >>> list(lower.build().state_dict()), list(upper.build().state_dict())
    (['1.weight', '1.bias'], ['3.weight', '3.bias', '5.weight', '5.bias'])
    """
    with torch.device("meta"):
        cut(model.build(initial=False), cuts)  # refuses
    parts = [replace(model, wrapper=Stage(cuts, at, model.wrapper)) for at in range(len(cuts) + 1)]
    names = [part.build(initial=False).state_dict().keys() for part in parts] if model.fixed else []
    fixed = [{n: v for n, v in model.fixed.items() if n in own} for own in names]
    return [replace(part, fixed=own) for part, own in zip(parts, fixed, strict=True)] if names else parts


def cut(module: nn.Module, cuts: Sequence[str]) -> list[nn.Module]:
    """Cuts a module where one tensor is alive: `upper(lower(x))` equals `module(x)` to the bit, and so do gradients.

    The parts share the layers of the module, under their names. A cut moves behind the pointwise functions that follow
    it: one that works in place would overwrite what is sent. Only the modules around a cut are traced; the others run
    as they are, so that dropout and normalization follow the mode of the part that they are in.

    Args:
        module: takes one tensor [B, ...].
        cuts: the names of the layers after which it is cut, in the order of the forward pass.

    Raises `ConfigError` for a name that no layer has; where a second tensor is alive, as inside a residual block; if a
    module around the cut decides by values or reads `training`, which tracing would freeze; or if a part has nothing
    to train. The message names the module.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    >>> [list(dict(half.named_children())) for half in cut(net, ["0"])]
    [['0', '1'], ['2']]
    """
    layers = dict(module.named_modules())
    for name in cuts:
        if not name or name not in layers:
            raise ConfigError(
                f"the model has no layer '{name}' to cut after",
                where=_KEY,
                hint=f"{nearest(name, choices(module, inside=False))}; layers inside of these have names with a dot",
            )
    graph = traced(
        module,
        cuts,
        f"the model cannot be cut after '{cuts[0]}'",
        _KEY,
        "cut after a layer that is not inside of it",
    )
    nodes = list(graph.nodes)
    ends = [_end(nodes, name, layers) for name in cuts]
    if ends != sorted(set(ends)):
        raise ConfigError(
            f"the cuts {', '.join(cuts)} are not in the order of the forward pass",
            where=_KEY,
            hint="name the earlier layer first, and layers with weights between them",
        )
    bounds = [-1, *ends, len(nodes) - 1]
    for name, end in zip(cuts, ends, strict=True):
        _refuse_second(nodes, end, name)
    parts: list[nn.Module] = [
        fx.GraphModule(module, _between(nodes, start, end), type(module).__name__)
        for start, end in pairwise(bounds)
    ]
    _refuse_shared(parts, cuts)
    return parts


def choices(module: nn.Module, inside: bool = True) -> list[str]:
    """The names of the layers after which a module can be cut, in order of definition.

    Without `inside`, only those of its direct children.

    >>> choices(nn.Sequential(nn.Flatten(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    ['1', '2']
    """
    found = []
    for name, _ in module.named_modules() if inside else module.named_children():
        try:
            if name and cut(module, [name]):
                found.append(name)
        except ConfigError:
            continue
    return found


class _Tracer(fx.Tracer):
    """Traces the modules around the cuts, and no other."""

    def __init__(self, cuts: Sequence[str]) -> None:
        super().__init__()
        self.cuts, self.inside = cuts, [""]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(name.startswith(f"{module_qualified_name}.") for name in self.cuts)

    def call_module(self, m: nn.Module, *rest: Any) -> Any:
        self.inside.append(self.path_of_module(m))
        made = super().call_module(m, *rest)
        self.inside.pop()  # not after an error, so that the last one is where it was
        return made


def traced(module: nn.Module, cuts: Sequence[str], failed: str, where: str, hint: str) -> fx.Graph:
    """The forward pass as a graph, with the modules around the layers `cuts` opened.

    Raises `ConfigError` that begins with `failed`, for a module around them that decides by values or reads `training`.
    """
    tracer = _Tracer(cuts)
    around = [at for name, at in module.named_modules() if not name or not tracer.is_leaf_module(at, name)]
    given = inspect.signature(module.forward).parameters.values()
    defaults = {each.name: each.default for each in given if each.default is not each.empty}
    try:
        with _without_mode(around):
            return tracer.trace(module, defaults or None)
    except (TraceError, AttributeError, TypeError, ValueError, _ModeRead) as error:
        name = tracer.inside[-1]
        inside = f"the layer '{name}'" if name else "the model"
        why = "reads `training`" if isinstance(error, _ModeRead) else "decides by what it computes"
        # Such as of `get_parameter`, which sees no parameter in a trace.
        if isinstance(error, AttributeError):
            why = f"cannot be traced: {error}"
        raise ConfigError(
            f"{failed}: {inside} ({type(module.get_submodule(name)).__name__}) {why}",
            where=where,
            hint=hint if name else "choose another model",
        ) from error


class _ModeRead(Exception):
    """A traced module has read `training`, whose value would stay in the graph."""


def _refuse_mode(module: nn.Module) -> bool:
    raise _ModeRead


@contextmanager
def _without_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Lets these modules raise `_ModeRead` where they read `training`."""
    kinds = [type(module) for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        module.__class__ = type(kind.__name__, (kind,), {"training": property(_refuse_mode)})
    try:
        yield
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind


def _end(nodes: Sequence[fx.Node], name: str, layers: dict[str, nn.Module]) -> int:
    """The position of the last node before the cut after this layer."""
    at = [k for k, node in enumerate(nodes) if node.op == "call_module" and node.target == name]
    if len(at) != 1:
        raise ConfigError(
            f"the forward pass calls '{name}' {len(at)} times, so it cannot be cut after it",
            where=_KEY,
            hint="cut after a layer that is called once",
        )
    end = at[0]
    while (node := next(iter(nodes[end].users))) and len(nodes[end].users) == 1 and pointwise(node, layers):
        end = nodes.index(node)
    return end


def pointwise(node: fx.Node, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a node of a graph computes each of its outputs from one of its inputs, as ReLU and dropout do."""
    if node.op == "call_module":
        return isinstance(layers[str(node.target)], _MODULES)
    return node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)


def _refuse_second(nodes: Sequence[fx.Node], end: int, name: str) -> None:
    """Raises `ConfigError` if anything but the tensor at the cut is used on both sides of it."""
    after = set(nodes[end + 1 :])
    for node in nodes[:end]:
        user = next((user for user in node.users if user in after), None)
        if user is not None and node.op != "get_attr":
            raise ConfigError(
                f"the model cannot be cut after '{name}': {_module_of(user)} also takes {_output_of(node)}, so that "
                "more than one tensor would have to be sent",
                where=_KEY,
                hint="cut after the layer around it, or before it",
            )


def _module_of(node: fx.Node) -> str:
    """The module that a node is computed in, for messages."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inner = str(node.target) if node.op == "call_module" else stack[-1][0] if stack else ""
    return f"'{inner}'" if inner else "the model's forward pass"


def _output_of(node: fx.Node) -> str:
    return "its input" if node.op == "placeholder" else f"the output of {_module_of(node)}"


def _between(nodes: Sequence[fx.Node], start: int, end: int) -> fx.Graph:
    """The graph from after the node `start` to the node `end`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    if start >= 0:
        copies[nodes[start]] = graph.placeholder("activations")
    inside = nodes[start + 1 : end + 1]
    # A parameter belongs to the part that uses it, wherever the trace has met it first.
    used = [n for n in nodes[: start + 1] if n.op == "get_attr" and not set(n.users).isdisjoint(inside)]
    for node in [*used, *inside]:
        if node.op != "get_attr" or not set(node.users).isdisjoint(inside):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if end < len(nodes) - 1:
        graph.output(copies[nodes[end]])
    graph.lint()
    return graph


def _refuse_shared(parts: Sequence[nn.Module], cuts: Sequence[str]) -> None:
    """Raises `ConfigError` if two parts hold one leaf, or a part has nothing to train."""
    seen: set[str] = set()
    for own in parts:
        spec = spec_of(own)
        if both := seen & spec.keys():
            raise ConfigError(
                f"the leaf '{min(both)}' is used before and after the cut after '{cuts[0]}'",
                where=_KEY,
                hint="cut where no layer is used on both sides",
            )
        if not part(spec, "weight", trainable=True):
            raise ConfigError(
                f"a cut after {' and '.join(repr(name) for name in cuts)} leaves a part without a weight to train",
                where=_KEY,
                hint="cut after a layer with trained weights, and before the last one of them",
            )
        seen |= spec.keys()
