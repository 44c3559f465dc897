"""Copies of payloads between the processor and a GPU: one copy a direction for all tensors, from pinned memory.

A copy of its own for each leaf costs a launch each, and from ordinary memory the host waits for every one of them. Here
the tensors of a payload are packed into one block of bytes, each at a multiple of 64 bytes, which suits every dtype and
the vector loads of CUDA's kernels. The block is in pinned (page-locked) memory, which a GPU reads without the host.

The pinned block is used once. It may be freed before its copy has ended, because PyTorch's allocator of pinned memory
reuses it only after the stream has passed the copy. It must not be written to again, and nothing here does. That
allocator never gives memory back to the system, so tensors that need more than one block cross in several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from fedlens.core.tree import mapped

_ALIGN = 64  # bytes, as torch aligns its own memory
_BLOCK = 2**28  # bytes of a block, unless one tensor is larger; so a large checkpoint pins little memory


def uploaded(value: Any, device: torch.device) -> Any:
    """The same payload with its tensors on this device, without waiting for it.

    All tensors that are in ordinary memory are copied at once. The results are views of one block on the GPU, so the
    last one that is in use keeps the memory of all; `fedlens.core.tree.copied` gives what is kept longer memory of its
    own. Where `device` is the processor, this is `downloaded`. Strides stay as they are, as with `Tensor.to`.

    Args:
        value: a tensor, or mappings, lists and tuples of tensors and other values; each mapping becomes a dict. Tensors
            lose their history.
        device: where they are used.

    >>> uploaded({"w": (torch.ones(1), 3)}, torch.device("cpu"))
    {'w': (tensor([1.]), 3)}
    """
    if isinstance(value, Tensor) and value.device == device:
        return value
    if device.type != "cuda":
        return downloaded(value) if device.type == "cpu" else mapped(value, lambda tensor: tensor.to(device))

    def sent(tensors: Sequence[Tensor]) -> list[Tensor]:
        pinned = torch.empty(block_size(tensors), dtype=torch.uint8, pin_memory=True)
        for place, tensor in zip(views(pinned, tensors), tensors, strict=True):
            place.copy_(tensor)
        return views(pinned.to(device, non_blocking=True), tensors)

    return _across(value, "cpu", device, sent)


def downloaded(value: Any) -> Any:
    """The same payload with its tensors in ordinary memory; the host waits once for all of them.

    Each tensor has memory of its own. The tensors of one payload are on one GPU. Strides stay as they are.

    Args:
        value: as in `uploaded`.

    >>> downloaded([torch.ones(1)])
    [tensor([1.])]
    """

    def brought(tensors: Sequence[Tensor]) -> list[Tensor]:
        block = torch.empty(block_size(tensors), dtype=torch.uint8, device=tensors[0].device)
        torch._foreach_copy_(views(block, tensors), list(tensors))
        pinned = torch.empty(len(block), dtype=torch.uint8, pin_memory=True).copy_(block)
        return [place.clone() for place in views(pinned, tensors)]

    return _across(value, "cuda", torch.device("cpu"), brought)


def block_size(tensors: Sequence[Tensor]) -> int:
    """The bytes of a block in which `views` finds room for tensors like these.

    >>> block_size([torch.ones(3), torch.ones(17)])
    192
    """
    return sum(map(_room, tensors))


def views(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a block uint8 [bytes], one for each tensor: of its dtype, shape and strides, at multiples of 64 bytes.

    Of a tensor that has gaps or overlaps itself, the part has neither.
    """
    starts = accumulate(map(_room, tensors), initial=0)
    found = []
    for tensor, start in zip(tensors, starts, strict=False):
        strides = (
            tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        )
        memory = block[start : start + tensor.nbytes].view(tensor.dtype)
        found.append(memory.as_strided(tensor.shape, strides, memory.storage_offset()))
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


@torch.no_grad()
def _across(
    value: Any, source: str, device: torch.device, copies: Callable[[Sequence[Tensor]], list[Tensor]]
) -> Any:
    """The payload with `copies` of the tensors on devices of the type `source`; what occurs twice is copied once."""
    crossing: dict[int, Tensor] = {}

    def noted(tensor: Tensor) -> Tensor:
        if tensor.device.type != source:
            return tensor
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.to(device)
        return crossing.setdefault(id(tensor), tensor)

    plain = mapped(value, noted)
    if not crossing:
        return plain
    ends = zip(crossing.values(), accumulate(map(_room, crossing.values())), strict=True)
    blocks = [[tensor for tensor, _ in block] for _, block in groupby(ends, lambda pair: pair[1] // _BLOCK)]
    copied = dict(zip(crossing, [copy for block in blocks for copy in copies(block)], strict=True))
    return mapped(plain, lambda tensor: copied.get(id(tensor), tensor))
