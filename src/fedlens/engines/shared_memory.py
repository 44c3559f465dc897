"""Payloads in memory that processes share: a small envelope is sent, the tensors stay where they are.

A region is anonymous memory behind a file descriptor. It has no name, so nothing is left over when every process
that maps it is gone, killed or not.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

_ALIGN = 64
_LONG = 16384  # an envelope from this size on travels in the region too
_LARGE = 4096  # bytes objects from this size on travel in the region, not in the envelope
_STRETCH = 1 << 18  # bytes that are looked at, and copied or left out, at once
LARGE = 1 << 22  # bytes of a reply from which on a region more costs more than a message
_numbers = itertools.count(1)


class Region:
    """One piece of shared memory, mapped in this process."""

    def __init__(self, size: int, fd: int | None = None, number: int | None = None) -> None:
        self.size = size
        self.number = next(_numbers) if number is None else number
        self.fd = _anonymous_file(size) if fd is None else fd
        self.map = mmap.mmap(self.fd, size)

    def view(self, freed: Callable[[], None] | None = None) -> memoryview:
        """A view of it all. `freed` is called when the last tensor made from this view is gone."""
        view = memoryview(self.map)
        if freed is not None:
            # A tensor keeps the object alive whose memory it looks at, so this tells when no tensor is left.
            weakref.finalize(view, freed).atexit = False
        return view

    def close(self) -> None:
        """Gives back the descriptor; the memory goes when the last tensor that looks at it is gone."""
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
    """A size for a region that is to be used again: the next power of two, so that slow growth needs few new ones.

    What is never written to costs no memory.

    >>> roomy(5000)
    8192
    """
    return max(1 << (size - 1).bit_length(), mmap.PAGESIZE)


class Pool:
    """Regions for reuse, so that a steady run maps its memory once."""

    def __init__(self) -> None:
        self._free: list[Region] = []

    def take(self, size: int) -> Region:
        """A free region of at least this size: the smallest that fits, or a new one."""
        fits = [region for region in self._free if region.size >= size]
        if fits:
            region = min(fits, key=lambda r: r.size)
            self._free.remove(region)
            return region
        return Region(roomy(size))

    def give(self, region: Region) -> None:
        """Takes a region back."""
        self._free.append(region)

    def close(self) -> None:
        """Gives back every free region."""
        for region in self._free:
            region.close()
        self._free.clear()


class Packer:
    """A payload, ready to be laid into a region: `envelope` is what is sent, `size` what the region must hold.

    `instead` gives what is sent in the place of a value, and None where that is the value itself.
    """

    def __init__(self, payload: Any, code: bool = False, instead: Callable[[Any], Any] | None = None) -> None:
        self._instead = instead
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
        """A short envelope that says where in the region the long one lies.

        A socket holds some 200 kB: a driver and a worker that both write more would wait for each other for ever.
        """
        place = self._append("e", envelope, len(envelope))
        buffer = io.BytesIO()
        _PlainPickler(buffer, lambda value: place if value is envelope else None).dump(envelope)
        return buffer.getvalue()

    def _place(self, value: Any) -> tuple[Any, ...] | None:
        if self._instead is not None and (found := self._instead(value)) is not None:
            return self._seen.setdefault(id(value), ("v", 0, 0, found))
        about: tuple[Any, ...]
        if type(value) is Tensor:  # a Parameter pickles itself, around a tensor that comes here
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
        self._parts.append((self.size, value))  # keeps it alive, so that its id stays its own
        self.size += -(-size // _ALIGN) * _ALIGN
        return place

    def write(self, view: memoryview, fresh: bool = False) -> None:
        """Copies the tensors in.

        A `fresh` region is all zero: there, stretches of zeros in arrays are not written, so that memory which
        is to be filled later (`fedlens.data.images.Store`) costs nothing until it is.
        """
        for offset, value in self._parts:
            if isinstance(value, bytes):
                view[offset : offset + len(value)] = value
            elif isinstance(value, Tensor):
                if value.numel():
                    _tensor(view, offset, value.shape, value.dtype).copy_(value.detach())
            elif fresh:
                _copy_nonzero(np.frombuffer(view, np.uint8, value.nbytes, offset), value)
            else:
                np.frombuffer(view, value.dtype, value.size, offset).reshape(value.shape)[...] = value


def _copy_nonzero(target: np.ndarray, value: np.ndarray) -> None:
    source = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    for start in range(0, len(source), _STRETCH):
        part = source[start : start + _STRETCH]
        if part.max():
            target[start : start + len(part)] = part


def unpack(envelope: bytes, view: memoryview) -> Any:
    """The payload behind an envelope; its tensors look at the region, nothing is copied."""
    return _Unpickler(io.BytesIO(envelope), view).load()


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


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also takes functions and classes of a notebook or script, by value."""

    def __init__(self, file: io.BytesIO, place: Callable[[Any], tuple[Any, ...] | None]) -> None:
        super().__init__(file, protocol=5)
        self._place = place

    def persistent_id(self, value: Any) -> Any:
        return self._place(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, view: memoryview) -> None:
        super().__init__(file)
        self._view = view

    def persistent_load(self, place: Any) -> Any:
        kind, offset, size, *about = place
        if kind == "t":
            return _tensor(self._view, offset, *about)
        if kind == "a":
            shape, dtype = about
            # By way of a tensor: numpy keeps the memory alive, but not the view that tells when it is free.
            return _tensor(self._view, offset, (size,), torch.uint8).numpy().view(dtype).reshape(shape)
        if kind == "v":
            return about[0]
        if kind == "e":
            return unpack(bytes(self._view[offset : offset + size]), self._view)
        return bytes(self._view[offset : offset + size])
