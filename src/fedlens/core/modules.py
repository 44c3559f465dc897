"""A module that is built once a worker and then loaded again and again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core.protocol import ModelSpec
from fedlens.core.tree import Leaf, Tree, part, spec_of


@dataclass(frozen=True)
class Loadable:
    """A module with its parameters and buffers at hand by name."""

    model: ModelSpec
    module: nn.Module
    spec: dict[str, Leaf]
    trainable: dict[str, Tensor]
    rest: dict[str, Tensor]  # buffers, counters, frozen weights

    @cached_property
    def buffers(self) -> list[str]:
        """The names of the running statistics."""
        return list(part(self.spec, "buffer"))

    @cached_property
    def counters(self) -> list[str]:
        """The names of the counters."""
        return list(part(self.spec, "counter"))

    def load(self, tree: Tree) -> None:
        """Copies a tree in. Leaves that the tree lacks stay as they are."""
        with torch.no_grad():
            for own in (self.trainable, self.rest):
                for name, value in own.items():
                    if name in tree:
                        value.copy_(tree[name])


def loadable(model: ModelSpec, scratch: dict[Any, Any], device: torch.device, which: str = "") -> Loadable:
    """The module of this spec, built at the first call and kept in a worker's `scratch`; `which` names further ones."""
    key = ("module", id(model), which)
    if key not in scratch:
        module = model.build().to(device)
        spec, state = spec_of(module), module.state_dict(keep_vars=True)
        trainable = part(spec, "weight", trainable=True)
        scratch[key] = Loadable(
            model,
            module,
            spec,
            {name: state[name] for name in trainable},
            {name: value.detach() for name, value in state.items() if name not in trainable},
        )
    found: Loadable = scratch[key]
    return found
