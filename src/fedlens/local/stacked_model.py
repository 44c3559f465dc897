"""The model of stacked clients: what it says of their images, each client's by its own weights.

In its fast form the images of all are one large batch, and only the layers that hold weights know of clients. Where a
model does more than such layers can show, it runs under `torch.func.vmap`: one client's forward pass, made one of
several by PyTorch. Which of the two a model takes is tried on a few random images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedlens.core.modules import Loadable
from fedlens.local.features import listening
from fedlens.local.rules import Tensors
from fedlens.local.stacked_layers import DROPOUTS, Masks, Stack, adapted, known


class StackedModel:
    """A module for stacked clients.

    Args:
        learner: the module; its own parameters are not looked at, but for frozen ones.
        scratch: where a worker keeps which of the two forms the module takes.
    """

    def __init__(self, learner: Loadable, scratch: dict[Any, Any]) -> None:
        self.learner, self.names = learner, list(learner.trainable)
        self.stack = Stack(Masks([]))
        self.random = any(isinstance(m, DROPOUTS) and m.p > 0 for m in learner.module.modules())
        key = ("stacked", id(learner.module))
        if key not in scratch:
            scratch[key] = known(learner.module) and self._alike()
        self.flat: bool = scratch[key]

    @contextmanager
    def ready(self, generators: Sequence[torch.Generator | None]) -> Iterator[Masks]:
        """Gives the module's layers the form for stacked clients, and back at the end; dropout draws from these."""
        module = self.learner.module
        module.train()
        self.stack.masks = Masks(generators)
        with adapted(module, self.stack) if self.flat else _under_vmap(module, self.stack.masks):
            yield self.stack.masks

    def __call__(self, weights: Tensors, images: Tensor) -> Tensor:
        """The outputs [A, B, ...] for images [A, B, ...], at trainable weights that are [A, ...] each."""
        if not self.flat:
            return self._vmapped(weights, images)
        self.stack.clients = len(images)
        own = dict(zip(self.names, weights, strict=True))
        out: Tensor = functional_call(self.learner.module, own, (images.flatten(0, 1),))
        return out.view(*images.shape[:2], *out.shape[1:])

    def _vmapped(self, weights: Tensors, images: Tensor) -> Tensor:
        found: Tensor = vmap(self._alone)(weights, images)
        return found

    def _alone(self, own: Tensors, images: Tensor) -> Tensor:
        found: Tensor = functional_call(
            self.learner.module, dict(zip(self.names, own, strict=True)), (images,)
        )
        return found

    def with_features(self, weights: Tensors, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs, and the features [A, B, features]: see `fedlens.local.features`."""
        clients = images.shape[:2]
        with listening(self.learner.module) as heard:
            if self.flat:
                return self(weights, images), heard.pop().view(*clients, -1) if heard else None

            def forward(own: Tensors, images: Tensor) -> tuple[Tensor, ...]:
                return self._alone(own, images), *heard[-1:]

            outputs, *features = vmap(forward)(weights, images)
        return outputs, features[0].reshape(*clients, -1) if features else None

    def _alike(self) -> bool:
        """Whether both forms say the same of two clients' images, each at weights of its own, dropout included."""
        learner, found = self.learner, []
        kept = {name: value.clone() for name, value in learner.rest.items()}
        training, random_state = learner.module.training, torch.get_rng_state()
        try:
            weights, images = self._trial()
            for self.flat in (False, True):
                with torch.no_grad(), self.ready([torch.Generator().manual_seed(k) for k in (0, 1)]) as masks:
                    masks.begin([3, 3], 3)
                    found.append(self(weights, images))
            one, other = found
            rtol, atol = (1e-3, 1e-5) if learner.half is None else (0.1, 0.02)
            return one.shape == other.shape and torch.allclose(one, other, rtol, atol)
        except (
            Exception
        ):  # of whatever kind: what is wrong with the model shows under vmap, in the run itself
            return False
        finally:
            learner.load(kept)
            learner.module.train(training)
            torch.set_rng_state(random_state)

    def _trial(self) -> tuple[Tensors, Tensor]:
        """Two clients' weights and three images of each."""
        g, own = torch.Generator().manual_seed(0), list(self.learner.trainable.values())
        weights = [
            torch.stack([w.detach(), w.detach() + 0.1 * torch.randn(w.shape, generator=g).to(w)]) for w in own
        ]
        images = torch.randn(2, 3, *self.learner.model.input_shape, generator=g)
        return weights, images.to(own[0])


# ---- under vmap


class _Dropped(torch.autograd.Function):
    """Times the mask; its place in a vmapped forward pass, where it sees the values of all clients."""

    @staticmethod
    def forward(values: Tensor, masks: Masks, layer: nn.Module) -> Tensor:
        raise RuntimeError("dropout of stacked clients was met outside of their common forward pass")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, values: Tensor, masks: Masks, layer: nn.Module) -> tuple[Tensor, int]:
        values = values.movedim(in_dims[0], 0)
        return values * masks.mask(values, layer), 0


@contextmanager
def _under_vmap(module: nn.Module, masks: Masks) -> Iterator[None]:
    """Gives layers the form that is right, or fast, under vmap; and back."""
    changed: list[nn.Module] = []
    try:
        for layer in module.modules():
            if "forward" in layer.__dict__:
                continue  # somebody else's
            if isinstance(layer, DROPOUTS) and layer.p > 0:
                layer.__dict__["forward"] = partial(_dropped, masks, layer)
            elif type(layer) is nn.Linear:
                layer.__dict__["forward"] = partial(_linear, layer)
            else:
                continue
            changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _dropped(masks: Masks, layer: nn.Module, input: Tensor) -> Tensor:
    if not layer.training:
        return input
    dropped: Tensor = _Dropped.apply(input, masks, layer)
    return dropped


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    """x W^T + b, as (W x^T)^T: of stacked clients the gradient of W comes out in W's own layout, and not turned."""
    rows = input.reshape(-1, input.shape[-1])
    out = (layer.weight @ rows.t()).t().contiguous().view(*input.shape[:-1], -1)
    return out if layer.bias is None else out + layer.bias
