"""Payloads in shared memory: a small envelope is sent, and the tensors stay in place.

A region is anonymous memory behind a file descriptor. It has no name, so nothing is left when all processes that map it
have ended, even if they were killed.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import tempfile
import weakref
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from fedlens.core.tree import HEAVY, Tree

_ALIGN = 64
_LONG = 16384  # an envelope of at least this size is put into the region too
_LARGE = 4096  # bytes objects of at least this size are put into the region
_STRETCH = 1 << 18  # bytes that are compared with zero, and copied or skipped, at once
LARGE = 1 << 22  # bytes of a reply above which an extra region costs more than a message
_numbers = itertools.count(1)


class Region:
    """One piece of shared memory, mapped in this process."""

    def __init__(self, size: int, fd: int | None = None, number: int | None = None) -> None:
        self.size = size
        self.number = next(_numbers) if number is None else number
        self.fd = _anonymous_file(size) if fd is None else fd
        self.map = mmap.mmap(self.fd, size)

    def view(self, freed: Callable[[], None] | None = None) -> memoryview:
        """A view of the region. `freed` is called when the last tensor made from this view is freed."""
        view = memoryview(self.map)
        if freed is not None:
            # A tensor keeps the owner of its memory alive, so this runs when no tensor is left.
            weakref.finalize(view, freed).atexit = False
        return view

    def close(self) -> None:
        """Closes the descriptor; the memory is freed when its last tensor is."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fedlens")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def roomy(size: int) -> int:
    """A size for a reusable region: the next power of two, so that slow growth needs few new regions.

    Pages that are never written cost no memory.

    >>> roomy(5000)
    8192
    """
    return max(1 << (size - 1).bit_length(), mmap.PAGESIZE)


class Pool:
    """Reusable regions, so that a run maps its memory once."""

    def __init__(self) -> None:
        self._free: list[Region] = []
        self._resident: dict[
            int, Region
        ] = {}  # by the address of their first byte, while they contain a tensor
        self._closed = False

    def take(self, size: int) -> Region:
        """A free region of at least this size: the smallest that fits, or a new one.

        A heavy region is not used for a small payload, because the next heavy payload would need another.
        """
        fits = [r for r in self._free if r.size >= size and (r.size < HEAVY or r.size <= 4 * roomy(size))]
        if fits:
            region = min(fits, key=lambda r: r.size)
            self._free.remove(region)
            return region
        return Region(roomy(size))

    def give(self, region: Region) -> None:
        """Takes a region back."""
        if self._closed:
            region.close()
        else:
            self._free.append(region)

    def empty_like(self, tree: Tree) -> dict[str, Tensor]:
        """An uninitialized tree like this one, in one region, which returns to the pool with its last tensor.

        >>> pool = Pool()
        >>> tree = pool.empty_like({"w": torch.ones(2, 3)})
        >>> tree["w"].shape, pool.home(tree["w"])[1], pool.home(torch.ones(1))
        (torch.Size([2, 3]), 0, None)
        """
        offsets = list(itertools.accumulate((_aligned(t.nbytes) for t in tree.values()), initial=0))
        region = self.take(offsets[-1])
        address = 0

        def freed() -> None:
            self._resident.pop(address, None)
            self.give(region)

        view = region.view(freed)
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        self._resident[address] = region
        new: dict[str, Tensor] = {}
        for (name, like), offset in zip(tree.items(), offsets, strict=False):
            strides = torch.empty_like(like, device="meta").stride()
            flat = _tensor(view, offset, (like.numel(),), like.dtype)
            new[name] = flat.as_strided(like.shape, strides)
        return new

    def home(self, tensor: Tensor) -> tuple[Region, int] | None:
        """The region in which `empty_like` placed this tensor, and its offset; None for other tensors.

        Only for contiguous tensors, as workers read them.
        """
        if self._resident and tensor.is_contiguous() and tensor.numel():
            at = tensor.data_ptr()
            for address, region in list(self._resident.items()):
                if address <= at < address + region.size:
                    return region, at - address
        return None

    def close(self) -> None:
        """Frees all free regions, and the others once their tensors are freed."""
        self._closed = True
        for region in self._free:
            region.close()
        self._free.clear()


class Packer:
    """A payload that is ready to be written into a region.

    Args:
        payload: the payload.
        code: whether it may hold functions and classes of a script.
        instead: returns a replacement for a value; None sends the value itself.
        home: returns the region that already contains a tensor, and its offset; None copies the tensor.

    Attributes:
        envelope: the bytes that are sent.
        size: the bytes that the region must hold.
        homes: the tensors in other regions that the envelope refers to, each with its region. While one of them is
            kept, its region is not used for anything else.
    """

    def __init__(
        self,
        payload: Any,
        code: bool = False,
        instead: Callable[[Any], Any] | None = None,
        home: Callable[[Tensor], tuple[Region, int] | None] | None = None,
    ) -> None:
        self._instead, self._home = instead, home
        self.homes: list[tuple[Region, Tensor]] = []
        self._parts: list[tuple[int, Tensor | np.ndarray | bytes]] = []
        self._seen: dict[int, tuple[Any, ...]] = {}
        self.size = 0
        buffer = io.BytesIO()
        pickler = (_CodePickler if code else _PlainPickler)(buffer, self._place)
        pickler.dump(payload)
        self.envelope = buffer.getvalue()
        if len(self.envelope) >= _LONG:
            self.envelope = self._letter(self.envelope)

    def _letter(self, envelope: bytes) -> bytes:
        """A short envelope that says where in the region the long one is.

        A socket buffers about 200 kB: a driver and a worker that both write more would wait for each other for ever.
        """
        place = self._append("e", envelope, len(envelope))
        buffer = io.BytesIO()
        _PlainPickler(buffer, lambda value: place if value is envelope else None).dump(envelope)
        return buffer.getvalue()

    def _place(self, value: Any) -> tuple[Any, ...] | None:
        if self._instead is not None and (found := self._instead(value)) is not None:
            return self._seen.setdefault(id(value), ("v", 0, 0, found))
        about: tuple[Any, ...]
        if type(value) is Tensor:  # a Parameter pickles itself, and then its tensor comes here
            if self._home is not None and (place := self._home(value)) is not None:
                region, offset = place
                self.homes.append((region, value.detach()))
                return ("r", offset, value.nbytes, region.number, tuple(value.shape), value.dtype)
            kind, size, about = "t", value.numel() * value.element_size(), (tuple(value.shape), value.dtype)
        elif isinstance(value, np.ndarray) and value.dtype.kind in "iufb" and value.nbytes >= _LARGE:
            kind, size, about = "a", value.nbytes, (value.shape, value.dtype.str)
        elif isinstance(value, bytes) and len(value) >= _LARGE:
            kind, size, about = "b", len(value), ()
        else:
            return None
        if id(value) not in self._seen:
            self._seen[id(value)] = self._append(kind, value, size, *about)
        return self._seen[id(value)]

    def _append(
        self, kind: str, value: Tensor | np.ndarray | bytes, size: int, *about: Any
    ) -> tuple[Any, ...]:
        place = (kind, self.size, size, *about)
        self._parts.append((self.size, value))  # keeps it alive, so that its id is not reused
        self.size += _aligned(size)
        return place

    def write(self, view: memoryview, new: bool = False) -> None:
        """Copies the tensors into a region.

        A `new` region is all zero, so zeros in arrays are not written there: memory that is filled later
        (`fedlens.data.images.Store`) costs nothing until then.
        """
        for offset, value in self._parts:
            if isinstance(value, bytes):
                view[offset : offset + len(value)] = value
            elif isinstance(value, Tensor):
                if value.numel():
                    _tensor(view, offset, value.shape, value.dtype).copy_(value.detach())
            elif new:
                _copy_nonzero(np.frombuffer(view, np.uint8, value.nbytes, offset), value)
            else:
                np.frombuffer(view, value.dtype, value.size, offset).reshape(value.shape)[...] = value


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _copy_nonzero(target: np.ndarray, value: np.ndarray) -> None:
    source = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    for start in range(0, len(source), _STRETCH):
        part = source[start : start + _STRETCH]
        if part.max():
            target[start : start + len(part)] = part


def unpack(envelope: bytes, view: memoryview, look: Callable[[int], memoryview] | None = None) -> Any:
    """The payload of an envelope. Its tensors are views of the region; nothing is copied.

    `look` returns the view of another region by its number, for envelopes that refer to others (`Packer.homes`).
    """
    return _Unpickler(io.BytesIO(envelope), view, look).load()


def _tensor(view: memoryview, offset: int, shape: Any, dtype: torch.dtype) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).view(tuple(shape))


class _PlainPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, place: Callable[[Any], tuple[Any, ...] | None]) -> None:
        super().__init__(file, protocol=5)
        self._place = place

    def persistent_id(self, value: Any) -> Any:
        return self._place(value)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """A code object with the name of its file: errors show it, and cloudpickle drops it since version 3.1.3."""
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_of_file, (make, parts, code.co_filename)


def _code_of_file(make: Callable[..., CodeType], parts: tuple[Any, ...], filename: str) -> CodeType:
    return make(*parts).replace(co_filename=filename)


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also pickles functions and classes of a notebook or script, by value."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, place: Callable[[Any], tuple[Any, ...] | None]) -> None:
        super().__init__(file, protocol=5)
        self._place = place

    def persistent_id(self, value: Any) -> Any:
        return self._place(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, view: memoryview, look: Callable[[int], memoryview] | None) -> None:
        super().__init__(file)
        self._view, self._look = view, look

    def persistent_load(self, place: Any) -> Any:
        kind, offset, size, *about = place
        if kind == "t":
            return _tensor(self._view, offset, *about)
        if kind == "a":
            shape, dtype = about
            # Through a tensor: numpy keeps the memory alive, but not the view whose end frees the region.
            return _tensor(self._view, offset, (size,), torch.uint8).numpy().view(dtype).reshape(shape)
        if kind == "r":
            assert self._look is not None
            number, *about = about
            return _tensor(self._look(number), offset, *about)
        if kind == "v":
            return about[0]
        if kind == "e":
            return unpack(bytes(self._view[offset : offset + size]), self._view, self._look)
        return bytes(self._view[offset : offset + size])
