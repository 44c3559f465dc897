"""Copies payloads between CPU and GPU: all tensors in one copy, through pinned memory.

Copying each leaf separately costs one launch per leaf and, from pageable memory, one synchronization per leaf. Here the
tensors of a payload are packed into one block of bytes, each aligned to 64 bytes, which suits every dtype and the
vector loads of CUDA's kernels. The block is in pinned (page-locked) memory, which the GPU reads asynchronously.

A pinned block is used once. It may be freed before its copy has ended, because PyTorch's allocator of pinned memory
reuses it only after the stream has passed the copy. It must not be written to again. That allocator never returns
memory to the system, so tensors that need more than one block are copied in several.
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
    """The same payload with its tensors on this device, without synchronization.

    All tensors on the CPU are copied together. The results are views of one block on the GPU, so each of them keeps the
    memory of all alive; `fedlens.core.tree.copied` gives tensors that are kept longer their own memory. If `device` is
    the CPU, this is `downloaded`. Strides are preserved, as with `Tensor.to`.

    Args:
        value: a tensor, or mappings, lists and tuples of tensors and other values; each mapping becomes a dict. Tensors
            lose their history.
        device: the target device.

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
    """The same payload with its tensors on the CPU, with one synchronization.

    Each tensor has its own memory. All GPU tensors of a payload are on one GPU. Strides are preserved.

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
    """The bytes of a block that is large enough for `views` of tensors like these.

    >>> block_size([torch.ones(3), torch.ones(17)])
    192
    """
    return sum(map(_room, tensors))


def views(block: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a block uint8 [bytes], one per tensor, with its dtype, shape and strides, aligned to 64 bytes.

    If a tensor has gaps or overlaps itself, its view does not.
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
    """The payload with `copies` of the tensors on `source` devices; a tensor that occurs twice is copied once."""
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
