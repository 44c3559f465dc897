"""The model of stacked clients: each client's images go through its own weights.

In the fast form the images of all clients are one large batch, and only layers with weights distinguish clients. Any
other model runs under `torch.func.vmap`, which turns the forward pass of one client into one of several. A test on a
few random images, with the initial weights, decides between the two forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedlens.base.errors import out_of_memory
from fedlens.core.modules import Loadable, module_in
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import random_state_kept
from fedlens.core.step_counts import steps_of
from fedlens.local.features import listening
from fedlens.local.rules import Tensors
from fedlens.local.vectorized.layers import adapted, drops, known, reformed
from fedlens.local.vectorized.stack import Masks, Stack
from fedlens.tasks.task import Task


class StackedModel:
    """A module for stacked clients.

    Args:
        learner: the module; only its frozen parameters are used.
        scratch: the cache of the worker, with the count of steps.
        task: its `outputs` is the forward pass, if it needs no targets there; None calls the module.
    """

    def __init__(self, learner: Loadable, scratch: dict[Any, Any], task: Task | None = None) -> None:
        self.learner, self.names = learner, list(learner.trainable)
        self.forward = TaskForward(learner.module, task)
        self.stack = Stack(Masks([]))
        self.random = any(drops(layer) for layer in learner.module.modules())
        self.slots = [_slot(learner.module, name) for name in self.names]
        leaves = list(learner.trainable.values())
        self.tied = len({id(leaf) for leaf in leaves}) < len(leaves)
        if "stacked" not in learner.kept:
            learner.kept["stacked"] = known(learner.module) and alike(
                learner.model, next(iter(learner.trainable.values())).device
            )
        self.flat: bool = learner.kept["stacked"]
        self.taken = steps_of(scratch)

    @contextmanager
    def ready(self, generators: Sequence[torch.Generator | None]) -> Iterator[Masks]:
        """Replaces the module's layers by their forms within the block; dropout draws from `generators`."""
        module = self.learner.module
        module.train()
        self.stack.masks = Masks(generators)
        with adapted(module, self.stack) if self.flat else _under_vmap(module, self.stack.masks):
            yield self.stack.masks

    def __call__(self, weights: Tensors, images: Tensor) -> Tensor:
        """The outputs [A, B, ...] for images [A, B, ...], with trainable weights [A, ...]."""
        if not self.flat:
            return self._vmapped(weights, images)
        self.stack.clients = len(images)
        out = self._forward(weights, images.flatten(0, 1))
        return out.view(*images.shape[:2], *out.shape[1:])

    def _forward(self, weights: Tensors, images: Tensor) -> Tensor:
        """`functional_call` without its search for the weights in every step."""
        out: Tensor
        if self.tied:
            out = functional_call(self.forward, self._named(weights), (images,))
            return out
        before = [slot[name] for slot, name in self.slots]
        try:
            for (slot, name), weight in zip(self.slots, weights, strict=True):
                slot[name] = weight
            out = self.forward.run(images)
        finally:
            for (slot, name), parameter in zip(self.slots, before, strict=True):
                slot[name] = parameter
        return out

    def _vmapped(self, weights: Tensors, images: Tensor) -> Tensor:
        outputs: Tensor = vmap(self._alone)(weights, images)
        return outputs

    def _alone(self, own: Tensors, images: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.forward, self._named(own), (images,))
        return outputs

    def _named(self, weights: Tensors) -> dict[str, Tensor]:
        return {f"module.{name}": weight for name, weight in zip(self.names, weights, strict=True)}

    def with_features(self, weights: Tensors, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs, and the features [A, B, features]: see `fedlens.local.features`."""
        clients = images.shape[:2]
        with listening(self.learner.module) as heard:
            if self.flat:
                return self(weights, images), heard.pop().reshape(*clients, -1) if heard else None

            def forward(own: Tensors, images: Tensor) -> tuple[Tensor, ...]:
                return self._alone(own, images), *heard[-1:]

            outputs, *features = vmap(forward)(weights, images)
        return outputs, features[0].reshape(*clients, -1) if features else None


class TaskForward(nn.Module):
    """The forward pass of a task as a module for `functional_call`."""

    def __init__(self, module: nn.Module, task: Task | None) -> None:
        super().__init__()
        self.module, self.task = module, task

    def forward(self, images: Tensor) -> Any:
        """The outputs."""
        return self.run(images)

    def run(self, images: Tensor) -> Any:
        """The outputs, called directly, without looking for hooks in every step."""
        return self.module(images) if self.task is None else self.task.outputs(self.module, images, None)


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary and key under which the module stores the parameter of this name."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._parameters, leaf


def alike(model: ModelSpec, device: torch.device) -> bool:
    """Whether both forms give the same outputs for two clients with different weights, including dropout.

    The test uses the initial weights, which depend only on the model's seed, and float64, so that neither rounding nor
    the current weights decide. A model that does not run in float64 is tested in its own dtype.
    """
    for tried, close in ((in_float64(model), 1e-9), (model, 1e-4)):
        try:
            with random_state_kept(device):
                one, other = (_outputs(tried, device, flat) for flat in (False, True))
        except Exception as error:  # the run itself reports what is wrong with the model
            if out_of_memory(error):
                raise
            continue
        return one.shape == other.shape and bool((one - other).norm() <= close * one.norm())
    return False


def _outputs(model: ModelSpec, device: torch.device, flat: bool) -> Tensor:
    """The outputs of a new module in this form for three images of each of two clients, in training mode."""
    learner = module_in(model, {}, device)
    learner.kept["stacked"] = flat
    stacked = StackedModel(learner, {})
    g, own = torch.Generator().manual_seed(0), [value.detach() for value in learner.trainable.values()]
    weights = [torch.stack([w, w + 0.1 * torch.randn(w.shape, generator=g).to(w)]) for w in own]
    images = torch.randn(2, 3, *model.input_shape, generator=g).to(own[0])
    with torch.no_grad(), stacked.ready([torch.Generator(device).manual_seed(k) for k in (0, 1)]) as masks:
        masks.begin([3, 3], 3)
        return stacked(weights, images)


def in_float64(model: ModelSpec) -> ModelSpec:
    """The same model with the same initial weights in float64, for tests that must not depend on rounding."""
    return replace(model, factory=partial(_doubled, model.factory))


def _doubled(factory: Callable[..., nn.Module], *given: Any, **settings: Any) -> nn.Module:
    return factory(*given, **settings).double()


# ---- under vmap


class _Dropped(torch.autograd.Function):
    """Multiplies by the mask in a vmapped forward pass; its `vmap` receives the values of all clients."""

    @staticmethod
    def forward(values: Tensor, masks: Masks, layer: nn.Module) -> Tensor:
        raise RuntimeError("dropout of clients that train together ran outside of their common forward pass")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, masks: Masks, layer: nn.Module) -> tuple[Tensor, int]:
        values = values.movedim(in_dims[0], 0)
        return values * masks.mask(values, layer), 0


def _under_vmap(module: nn.Module, masks: Masks) -> AbstractContextManager[None]:
    """Replaces layers by the forms that are right, or fast, under vmap, within the block."""

    def form(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
        if drops(layer):
            return partial(_dropped, masks, layer)
        return partial(_linear, layer) if type(layer) is nn.Linear else None

    return reformed(module, form)


def _dropped(masks: Masks, layer: nn.Module, input: Tensor) -> Tensor:
    if not layer.training:
        return input
    dropped: Tensor = _Dropped.apply(input, masks, layer)
    return dropped


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    """x W^T + b as (W x^T)^T: the gradient of stacked W then has the layout of W and is not transposed."""
    rows = input.reshape(-1, input.shape[-1])
    out = (layer.weight @ rows.t()).t().contiguous().view(*input.shape[:-1], -1)
    return out if layer.bias is None else out + layer.bias
