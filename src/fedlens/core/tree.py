"""Trees: named tensors, their spec, and the pure operations on them.

A tree has the names of a `state_dict`. Its spec gives every leaf a *role*, because each role is aggregated differently:
weights are averaged and moved by server optimizers, running statistics (`buffer`) are averaged and never touched by a
server optimizer, integer `counter`s take the largest value, and leaves that never change (`fixed`) are not aggregated.

**Ownership.** The tensors of a payload are read-only for both sides: neither the sender nor the receiver writes into
them. The exception is a tensor that is documented as *donated*: it belongs to the receiver alone. The receiver may
write into it, and the sender does not read it again. An operation lists the fields that it donates in
`Outcome.donated`. Its other fields are valid only until its next call, as it may reuse their memory, so the engine
copies them (`copied`) before that call. Every reply that reaches an algorithm is read-only, and never changes. A state
is replaced, never changed: a server step may write into a donated update, but not into the weights. So a run that is
interrupted at any moment still has its last state.

**Representation.** During training, weights, gradients and updates are lists, in the order of `Loadable.trainable`.
Payloads and states hold trees. `LocalContext.tree` turns one into the other, once, where a client's payload is made.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.base.errors import FedlensError
from fedlens.base.frozen import held

Tree = Mapping[str, Tensor]
NO_NORMS: Mapping[int, float] = MappingProxyType({})
HEAVY = 2**26  # bytes from which copying a tree costs more than avoiding the copy
Role = Literal["weight", "buffer", "counter", "fixed", "head", "arch"]


@dataclass(frozen=True)
class Leaf:
    """What one named tensor is: its role, shape, dtype, and whether training changes it."""

    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @property
    def fixed(self) -> bool:
        """Whether it never changes in a run: a buffer that training leaves alone, or a weight that is not trained."""
        return self.role == "fixed" or (self.role == "weight" and not self.trainable)


TreeSpec = Mapping[str, Leaf]


class FixedBuffers(nn.Module):
    """Base class of layers whose own buffers never change, such as the statistics of a frozen normalization.

    `spec_of` gives these buffers the role `fixed`: clients do not send them back, and no server step changes them.
    """


def spec_of(module: nn.Module) -> dict[str, Leaf]:
    """The spec of a module's state: parameters are weights, float buffers `buffer`, integer ones `counter`.

    The buffers of a layer that is `FixedBuffers`, or that is held in evaluation mode (`fedlens.base.frozen`), are
    `fixed`.

    >>> spec = spec_of(nn.BatchNorm1d(3))
    >>> {name: leaf.role for name, leaf in spec.items()}["num_batches_tracked"]
    'counter'
    """
    parameters = dict(module.named_parameters())
    tied = [name for name, _ in module.named_parameters(remove_duplicate=False) if name not in parameters]
    if tied:
        raise FedlensError(
            f"the model uses one parameter under two names ('{tied[0]}' is the second)",
            where="model.name",
            hint="tied parameters are not supported: call the same layer twice instead",
        )
    fixed = {
        ".".join(filter(None, [path, name]))
        for path, layer in module.named_modules()
        if isinstance(layer, FixedBuffers) or held(layer)
        for name, _ in layer.named_buffers(recurse=False)
    }
    spec: dict[str, Leaf] = {}
    for name, value in module.state_dict().items():
        if name in parameters:
            spec[name] = Leaf("weight", tuple(value.shape), value.dtype, parameters[name].requires_grad)
        else:
            role: Role = "fixed" if name in fixed else "buffer" if value.is_floating_point() else "counter"
            spec[name] = Leaf(role, tuple(value.shape), value.dtype, False)
    return spec


def part(spec: TreeSpec, *roles: Role, trainable: bool | None = None) -> list[str]:
    """The names of the leaves with one of these roles, in the spec's order."""
    return [
        name
        for name, leaf in spec.items()
        if leaf.role in roles and (trainable is None or leaf.trainable == trainable)
    ]


def fixed_leaves(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the leaves that never change in a run, by name.

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> _ = net[0].requires_grad_(False)
    >>> list(fixed_leaves(net))
    ['0.weight', '0.bias']
    """
    state, spec = module.state_dict(), spec_of(module)
    return {name: state[name].detach().clone() for name, leaf in spec.items() if leaf.fixed}


def tree_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's state as a tree."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def load_into(module: nn.Module, tree: Tree) -> None:
    """Copies a tree into a module of the same names."""
    with torch.no_grad():
        state = module.state_dict()
        for name, value in tree.items():
            state[name].copy_(value)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same payload with `function` of every tensor; mappings become dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: mapped(item, function) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(item, function) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def copied(value: Any) -> Any:
    """The same payload with every tensor copied and detached.

    >>> copied({"steps": (1, torch.ones(1, requires_grad=True))})
    {'steps': (1, tensor([1.]))}
    """
    on_gpu: list[Tensor] = []
    copies: list[Tensor] = []

    def copy_of(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not tensor.is_cuda or tensor.layout is not torch.strided:
            return tensor.clone()
        on_gpu.append(tensor)
        copies.append(torch.empty_like(tensor))
        return copies[-1]

    made = mapped(value, copy_of)
    if copies:  # one kernel for all leaves
        torch._foreach_copy_(copies, on_gpu)
    return made


def select(tree: Tree, names: Sequence[str]) -> dict[str, Tensor]:
    """The leaves of these names, not copied."""
    return {name: tree[name] for name in names}


def map_tree(function: Callable[..., Tensor], *trees: Tree) -> dict[str, Tensor]:
    """A new tree from the leaves of the same name."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def zeros_like(tree: Tree) -> dict[str, Tensor]:
    """A tree of zeros in the shapes and dtypes of `tree`."""
    return map_tree(torch.zeros_like, tree)


def add(a: Tree, b: Tree, scale: float = 1.0, donated: bool = False) -> dict[str, Tensor]:
    """a + scale b, as a new tree.

    With `donated`, b is consumed: on the CPU, the result reuses its memory where the layout fits. On a GPU, one kernel
    adds all leaves.

    >>> add({"w": torch.ones(2)}, {"w": torch.ones(2)}, scale=-0.5)["w"]
    tensor([0.5000, 0.5000])
    """

    if a and next(iter(a.values())).is_cuda:
        sums = torch._foreach_add(list(a.values()), [b[name] for name in a], alpha=scale)
        return dict(zip(a, sums, strict=True))

    def added(x: Tensor, y: Tensor) -> Tensor:
        # In another layout the elements would be visited in another order, which may round differently.
        fits = donated and (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        return torch.add(x, y, alpha=scale, out=y if fits else None)

    return map_tree(added, a, b)


def subtract(a: Tree, b: Tree) -> dict[str, Tensor]:
    """a - b, as a new tree."""
    return map_tree(torch.sub, a, b)


def scale(tree: Tree, factor: float) -> dict[str, Tensor]:
    """factor * tree, as a new tree."""
    return map_tree(lambda x: x * factor, tree)


def norm(tree: Tree) -> Tensor:
    """The Euclidean norm over all leaves, a 0-dim tensor."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tree.values()))).double())
    return total


def finite_norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm over all floating-point tensors; NaN or infinite exactly if one of them holds such a value.

    If the squares of finite values overflow, the norm is computed relative to the largest magnitude, in float64, and is
    at most the largest float.

    >>> finite_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]), finite_norm([torch.tensor([1.0, float("nan")])])
    (5.0, nan)
    >>> f"{finite_norm([torch.full((4,), 3e38)]):.3g}"
    '6e+38'
    """
    return finite_norms([tensors])[0]


def finite_norms(groups: Sequence[Sequence[Tensor]], known: Mapping[int, float] = NO_NORMS) -> list[float]:
    """The `finite_norm` of each group of tensors, with one synchronization for all that are on a GPU.

    Tensors whose `leaf_norms` are in `known` need no synchronization.
    """
    floats = [[t for t in tensors if t.is_floating_point()] for tensors in groups]
    found = {**known, **leaf_norms([t for tensors in floats for t in tensors if id(t) not in known])}
    one = torch.linalg.vector_norm
    norms = [[found[id(t)] if t.is_cuda else one(t).item() for t in tensors] for tensors in floats]
    return [_finite_norm(*pair) for pair in zip(floats, norms, strict=True)]


def leaf_norms(tensors: Sequence[Tensor]) -> dict[int, float]:
    """The Euclidean norms of the floating-point tensors on a GPU, by `id`, with one synchronization."""
    on_gpu = [t for t in tensors if t.is_cuda and t.is_floating_point()]
    norms = torch.stack(torch._foreach_norm(on_gpu)).tolist() if on_gpu else ()
    return dict(zip(map(id, on_gpu), norms, strict=True))


def _finite_norm(floats: Sequence[Tensor], norms: Sequence[float]) -> float:
    total = math.hypot(*norms)
    if math.isfinite(total) or not all(t.isfinite().all() for t in floats):
        return total
    floats = [t for t in floats if t.numel()]
    scale = max(t.abs().max().item() for t in floats)
    parts = [torch.linalg.vector_norm(t.double() / scale).item() for t in floats]
    return min(scale * math.hypot(*parts), sys.float_info.max)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no floating-point tensor holds a NaN or an infinity.

    >>> all_finite([torch.tensor([1.0]), torch.tensor([float("nan")])])
    False
    """
    return math.isfinite(finite_norm(tensors))


def count(spec: TreeSpec, trainable: bool | None = None) -> int:
    """The number of parameters (weights): trainable, frozen, or both."""
    return sum(
        torch.Size(leaf.shape).numel()
        for leaf in spec.values()
        if leaf.role not in ("buffer", "counter", "fixed")
        and (trainable is None or leaf.trainable == trainable)
    )


def digest(tree: Tree) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(tree):
        # contiguous() would leave a tensor of one element with the stride that it has.
        value = tree[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        total.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return total.hexdigest()
