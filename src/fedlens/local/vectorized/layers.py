"""Layers of stacked clients: weights [A, ...] applied to the images of A clients, B each, in one batch [A * B, ...].

All other layers get one large batch. This is right if they treat each example separately, which
`fedlens.local.vectorized.model` tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlens.local.vectorized.convolution import convolution, in_one_format
from fedlens.local.vectorized.stack import DROPOUTS, Stack
from fedlens.models.norms import FrozenBatchNorm, GroupNormAct


def known(module: nn.Module) -> bool:
    """Whether all trained parameters of this module belong to layers with a form here."""
    return all(
        (type(layer) in FORMS and "forward" not in layer.__dict__)
        or not any(p.requires_grad for p in layer.parameters(recurse=False))
        for layer in module.modules()
    )


@contextmanager
def reformed(
    module: nn.Module, form: Callable[[nn.Module], Callable[[Tensor], Tensor] | None]
) -> Iterator[None]:
    """Replaces the forward pass of each layer for which `form` returns one, within the block.

    A layer whose forward pass is already replaced is left unchanged.
    """
    changed: list[nn.Module] = []
    try:
        for layer in module.modules():
            forward = None if "forward" in layer.__dict__ else form(layer)
            if forward is not None:
                layer.__dict__["forward"] = forward
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def adapted(module: nn.Module, stack: Stack) -> AbstractContextManager[None]:
    """Replaces the layers of the module by their forms for stacked clients, within the block."""

    def form(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
        own = _dropped if drops(layer) else FORMS.get(type(layer))
        return None if own is None else partial(own, stack, layer)

    return reformed(module, form)


def drops(layer: nn.Module) -> bool:
    """Whether the layer is a dropout layer with p > 0."""
    return isinstance(layer, DROPOUTS) and layer.p > 0


def _dropped(stack: Stack, layer: nn.Module, input: Tensor) -> Tensor:
    if not layer.training:
        return input
    values = input.view(stack.clients, -1, *input.shape[1:])
    return (values * stack.masks.mask(values, layer)).flatten(0, 1)


# ---- linear


def _linear(stack: Stack, layer: nn.Linear, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 2 and (bias is None or bias.dim() == 1):  # frozen: the same for all clients
        return functional.linear(input, weight, bias)
    images, own, shift = in_one_format(input, weight, bias)
    rows = images.reshape(stack.clients, -1, input.shape[-1])
    if own.dim() == 2:
        own = own.expand(stack.clients, *own.shape)
    out: Tensor = _Linear.apply(rows, own, shift, stack.products)
    return out.view(*input.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    """x W^T + b of each client. The gradient of W has the layout of W, or goes to `Stack.products`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, products: Any) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products = products if weight.is_leaf else None
        if bias is None:
            return torch.bmm(rows, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(-2), rows, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,), (rows, weight) = slopes, ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = torch.bmm(slope, weight)
        if ctx.needs_input_grad[1]:
            if ctx.products is not None:
                ctx.products.append((weight, slope.transpose(1, 2), rows))
            else:
                of_weight = torch.bmm(slope.transpose(1, 2), rows)
        if ctx.needs_input_grad[2]:
            of_bias = slope.sum(1)
        return of_rows, of_weight, of_bias, None


# ---- normalization


def _group_norm(stack: Stack, layer: nn.GroupNorm, input: Tensor) -> Tensor:
    values = functional.group_norm(input, layer.num_groups, None, None, layer.eps)
    return _scaled(stack, values, layer, 1, input.dim() - 2)


def _group_norm_act(stack: Stack, layer: GroupNormAct, input: Tensor) -> Tensor:
    return layer.after(_group_norm(stack, layer, input))


def _frozen(stack: Stack, layer: FrozenBatchNorm, input: Tensor) -> Tensor:
    return FrozenBatchNorm.forward(layer, input)  # the same for all clients


def _layer_norm(stack: Stack, layer: nn.LayerNorm, input: Tensor) -> Tensor:
    values = functional.layer_norm(input, layer.normalized_shape, None, None, layer.eps)
    return _scaled(stack, values, layer, input.dim() - len(layer.normalized_shape), 0)


def _scaled(stack: Stack, values: Tensor, layer: nn.Module, middle: int, trailing: int) -> Tensor:
    """values * weight + bias of each client; the weight's axes come after `middle` and before `trailing` axes."""
    for name, act in (("weight", torch.mul), ("bias", torch.add)):
        own: Tensor | None = getattr(layer, name, None)
        if own is None:
            continue
        if own.dim() == values.dim() - middle - trailing:  # frozen: the same for all clients
            own = own.expand(stack.clients, *own.shape)
        shape = (stack.clients, *[1] * middle, *own.shape[1:], *[1] * trailing)
        by_client = values.view(stack.clients, -1, *values.shape[1:])
        # Not a view for autograd, which would copy it for a following in-place layer; the tensor is not used elsewhere.
        values = torch.ops.aten._unsafe_view(act(by_client, own.reshape(shape)), values.shape)
    return values


# By the exact type of a layer: a subclass may compute something else.
FORMS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: convolution,
    nn.GroupNorm: _group_norm,
    GroupNormAct: _group_norm_act,
    FrozenBatchNorm: _frozen,
    nn.LayerNorm: _layer_norm,
}
