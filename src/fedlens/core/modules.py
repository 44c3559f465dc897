"""Modules that are built once per worker and loaded with new weights for each client."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core.arithmetic import PLAIN, Arithmetic
from fedlens.core.device_copies import block_size, views
from fedlens.core.protocol import Client, ModelSpec
from fedlens.core.tree import Leaf, Tree, part, spec_of


@dataclass(frozen=True)
class Loadable:
    """A module with its parameters and buffers by name."""

    model: ModelSpec
    module: nn.Module
    spec: dict[str, Leaf]
    trainable: dict[str, Tensor]
    rest: dict[str, Tensor]  # buffers, counters, frozen weights that are sent
    autocast_dtype: torch.dtype | None = None  # of its passes; None for 32 bits
    # The shapes and dtypes of weights that were given away; `load` allocates their memory.
    donated: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)  # what was computed from the module's structure

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the trainable weights."""
        return sum(weight.nbytes for weight in self.trainable.values())

    @cached_property
    def buffers(self) -> list[str]:
        """The names of the running statistics that training moves."""
        return part(self.spec, "buffer")

    @cached_property
    def counters(self) -> list[str]:
        """The names of the counters that training moves."""
        return part(self.spec, "counter")

    def load(self, tree: Tree) -> None:
        """Copies a tree into the module. Leaves that it lacks, and those of `model.fixed`, keep their values."""
        self._take_back()
        with torch.no_grad():
            own = [(v, tree[n]) for each in (self.trainable, self.rest) for n, v in each.items() if n in tree]
            if own and own[0][0].is_cuda:  # in few launches
                torch._foreach_copy_([value for value, _ in own], [value for _, value in own])
                return
            for value, new in own:
                value.copy_(new)

    def give(self) -> list[Tensor]:
        """Gives away the trainable weights with their memory (`fedlens.core.tree`); `load` allocates it anew."""
        weights = []
        for name, weight in self.trainable.items():
            weights.append(weight.detach())
            self.donated[name] = torch.empty_like(weight, device="meta")  # without gaps
            weight.data = weight.new_empty(()).expand(weight.shape)  # the shape, and no memory
        return weights

    def _take_back(self) -> None:
        if not self.donated:
            return
        forms, device = list(self.donated.values()), next(iter(self.trainable.values())).device
        size = block_size(forms)
        if device.type == "cpu":
            # Separate pages, which return to the system at once: the heap would fragment from client to client.
            block = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)
        else:
            block = torch.empty(size, dtype=torch.uint8, device=device)
        for name, memory in zip(self.donated, views(block, forms), strict=True):
            self.trainable[name].data = memory
        self.donated.clear()


def loadable(model: ModelSpec, client: Client, which: str = "") -> Loadable:
    """The module of this spec on the client's device, in its arithmetic; `which` tells several modules apart.

    It is built at the first call and kept in the worker's `scratch`. Of a model that is varied, the last module is kept
    and built again where the changes are others: one made in each round would never be released.
    """
    return module_in(model, client.scratch, client.device, client.arithmetic, which)


def module_in(
    model: ModelSpec,
    scratch: dict[Any, Any],
    device: torch.device,
    arithmetic: Arithmetic = PLAIN,
    which: str = "",
) -> Loadable:
    """Like `loadable`, without a client."""
    key = ("module", id(model.origin or model), which)
    kept: Loadable | None = scratch.get(key)
    if kept is None or (kept.model is not model and kept.model != model):
        module = arithmetic.fit(model.build(initial=False), device)
        spec, state = spec_of(module), module.state_dict(keep_vars=True)
        _fix(state, model.fixed)
        trainable = part(spec, "weight", trainable=True)
        scratch[key] = kept = Loadable(
            model,
            module,
            spec,
            {name: state[name] for name in trainable},
            {
                name: value.detach()
                for name, value in state.items()
                if name not in trainable and name not in model.fixed
            },
            arithmetic.autocast_dtype,
        )
    return kept


def _fix(state: dict[str, Tensor], fixed: Tree) -> None:
    """Sets the fixed leaves. They share the memory of `fixed` if the layout fits: nothing writes to them."""
    for name, value in fixed.items():
        own = state[name]
        if (own.device, own.dtype, own.stride()) == (value.device, value.dtype, value.stride()):
            own.data = value
        else:
            own.data.copy_(value)
