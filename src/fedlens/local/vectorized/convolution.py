"""Convolutions of stacked clients: weights [A, O, C, ...] against images [A * B, C, H, W].

There are three forms, chosen only by shape, number format and device, so that runs are reproducible to the bit:

- grouped: one convolution whose groups are the clients. Fast if each client has at least eight channels; with fewer, as
  in the first layer of most models, the libraries' kernels for groups leave most of the machine idle.
- each: the convolutions of one client after the other.
- unfolded: patches as rows of a matrix, and one batched product. For small layers, where a call per client costs more
  than its computation. It copies each image `kernel ** 2` times, so it is slower for large ones.

Measured on a CPU (forward and backward, ms; 10 clients of mcmahan-cnn at batch 10, 4 of hsu-cnn at batch 32):

                              grouped   each   unfolded   one client after the other
    mcmahan-cnn, 1 -> 32           27     17         22                           16
    mcmahan-cnn, 32 -> 64          94     99        244                          100
    hsu-cnn, 3 -> 64              116     64         99                           58
    hsu-cnn, 64 -> 64             241    235        651                          234
    1 -> 16 of 8 x 8 pixels       6.5     11        2.4                           17
    16 -> 16 of 8 x 8 pixels       12     27         31                           29

Measured on an NVIDIA H200 (forward and backward, ms; 10 clients; PyTorch 2.11; `python -m benchmarks.gpu forms`):

                                        fp32                         bf16
                              grouped   each   unfolded    grouped   each   unfolded
    1 -> 32, 5x5, batch 10       0.45   0.94       0.85       0.29   1.02       0.60
    3 -> 64, 5x5, batch 32       0.85   1.23       1.56       1.15   1.94       1.16
    32 -> 64, 5x5, batch 10      0.88   1.75       0.72       1.05   2.19       0.87
    64 -> 64, 5x5, batch 32      2.97   2.48       3.65       0.79   2.13       2.35
    128 -> 128, 3x3, batch 64    9.16   4.88       6.73       1.04   2.00       3.41
    512 -> 512, 3x3, batch 32    8.49   8.82       2.18       1.47   1.94       0.67

Copying patches pays where their products have many output channels, and calls for each client where these are large.
With 50 clients and one or three channels, `unfolded` is up to twice as fast as `grouped`, with 4 clients it is slower.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlens.local.vectorized.stack import Stack

_CHANNELS = 8  # of a group, from which on a grouped convolution is no slower than one per client
_LITTLE = 2_000_000  # multiplications of a client's batch, up to which a call costs more than its computation
# On a GPU:
_GROUPS = 16  # of few channels, up to which a grouped convolution is faster than copying patches
_MUCH = (
    600_000_000  # multiplications of a client's batch, from which copying patches can cost more than it saves
)
_WIDE = 128  # output channels, beyond which it does not


def convolution(stack: Stack, layer: nn.Conv2d, input: Tensor) -> Tensor:
    """The output of `layer` for images [A * B, C, H, W], with each client's own weight and bias."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 4 and (bias is None or bias.dim() == 1):  # frozen: the same for all clients
        same: Tensor = layer._conv_forward(input, weight, bias)
        return same
    input, weight, bias = in_one_format(input, weight, bias)
    padded, padding = _padded(layer, input)
    weight = weight.expand(stack.clients, *weight.shape[-4:])
    form = FORMS[chosen(layer, padded, stack.clients, padding)]
    out = form(padded, weight, layer.stride, padding, layer.dilation, layer.groups)
    if bias is None:
        return out
    bias = bias.expand(stack.clients, bias.shape[-1])
    moved: Tensor = out.view(stack.clients, -1, *out.shape[1:]) + bias[:, None, :, None, None]
    moved = torch.ops.aten._unsafe_view(moved, out.shape)  # not a view: see `layers._scaled`
    return moved


def in_one_format(
    images: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors in the dtype of autocast, if it is on: autocast does not apply to hand-written derivatives."""
    device = images.device.type
    if not torch.is_autocast_enabled(device):
        return images, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.dtype == torch.float32 else value

    return cast(images), cast(weight), None if bias is None else cast(bias)


def chosen(layer: nn.Conv2d, images: Tensor, clients: int, padding: tuple[int, ...]) -> str:
    """The name of the form for images [A * B, C, H, W] of this many clients."""
    few = layer.in_channels // layer.groups < _CHANNELS
    if images.is_cuda and (layer.groups > 1 or few):
        return "grouped" if layer.groups > 1 or clients <= _GROUPS else "unfolded"
    if not images.is_cuda and not few:
        return "grouped"
    high, wide = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            images.shape[2:], padding, layer.dilation, layer.kernel_size, layer.stride, strict=True
        )
    )
    each = layer.out_channels * layer.in_channels // layer.groups * prod(layer.kernel_size)
    work = len(images) // clients * high * wide * each
    if images.is_cuda:
        if work < _MUCH or layer.out_channels > _WIDE:
            return "unfolded"
        return "each" if images.dtype == torch.float32 else "grouped"
    return "unfolded" if work <= _LITTLE and layer.groups == 1 else "each"


def _padded(layer: nn.Conv2d, input: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The padded images, and the zero padding that the convolution still has to add on both sides."""
    # Left, right, top, bottom; the same numbers in each padding mode.
    around = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        return functional.pad(input, around, mode=layer.padding_mode), (0, 0)
    left, right, top, bottom = around
    if (left, top) != (right, bottom):  # "same" with an even kernel
        return functional.pad(input, around), (0, 0)
    return input, (top, left)


def _grouped(images: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    clients = len(weight)
    beside = images.view(clients, -1, *images.shape[1:]).transpose(0, 1).flatten(1, 2)
    out = functional.conv2d(beside, weight.flatten(0, 1), None, stride, padding, dilation, clients * groups)
    return out.view(len(out), clients, -1, *out.shape[2:]).transpose(0, 1).flatten(0, 1)


def _each(images: Tensor, weight: Tensor, *how: Any) -> Tensor:
    out: Tensor = _Each.apply(images, weight, *how)
    return out


class _Each(torch.autograd.Function):
    """The convolutions of one client after the other, with a backward pass that allocates one gradient for all."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, *how: Any) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.how = how
        rows = zip(images.chunk(len(weight)), weight, strict=True)
        return torch.cat([functional.conv2d(x, w, None, *how) for x, w in rows])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        images, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        wanted = [*ctx.needs_input_grad[:2], False]
        found = [
            torch.ops.aten.convolution_backward(
                g, x, w, None, stride, padding, dilation, False, [0, 0], groups, wanted
            )
            for g, x, w in zip(slopes[0].chunk(len(weight)), images.chunk(len(weight)), weight, strict=True)
        ]
        of_images = torch.cat([row[0] for row in found]) if wanted[0] else None
        of_weight = torch.stack([row[1] for row in found]) if wanted[1] else None
        return of_images, of_weight, *[None] * len(ctx.how)


def _unfolded(
    images: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    out: Tensor = _Unfolded.apply(images, weight, stride, padding, dilation)
    return out


class _Unfolded(torch.autograd.Function):
    """weight [A, O, K] @ patches [A, K, B * L] with K values per patch and L positions of the kernel."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        (clients, kernel), (high, wide) = (len(weight), weight.shape[3:]), padding
        padded = functional.pad(images, (wide, wide, high, high)) if high or wide else images
        patches = padded.view(clients, -1, *padded.shape[1:])
        for axis, k, s, d in zip((3, 4), kernel, stride, dilation, strict=True):
            patches = patches.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        _, batch, _, high, wide = patches.shape[:5]
        rows = patches.permute(0, 2, 5, 6, 1, 3, 4).reshape(clients, weight[0, 0].numel(), -1)
        ctx.save_for_backward(rows, weight)
        ctx.how = images.shape, (tuple(kernel), dilation, padding, stride)
        product = torch.bmm(weight.flatten(2), rows).view(clients, -1, batch, high, wide)
        # A new tensor, not a view: autograd does not allow a following in-place layer on a view.
        out = product.new_empty(clients * batch, product.shape[1], high, wide)
        out.view(clients, batch, *out.shape[1:]).copy_(product.transpose(1, 2))
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        shape, how = ctx.how
        clients, batch = len(weight), shape[0] // len(weight)
        slope = slopes[0].reshape(clients, batch, weight.shape[1], -1).transpose(1, 2).flatten(2)
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            back = torch.bmm(weight.flatten(2).transpose(1, 2), slope).view(clients, rows.shape[1], batch, -1)
            of_images = functional.fold(back.transpose(1, 2).flatten(0, 1), shape[2:], *how)
        if ctx.needs_input_grad[1]:
            of_weight = torch.bmm(slope, rows.transpose(1, 2)).view(weight.shape)
        return of_images, of_weight, None, None, None


FORMS = {"grouped": _grouped, "each": _each, "unfolded": _unfolded}
