"""Safetensors files with their SHA-256: tensors may share memory, and nothing read from disk stays mapped.

`safetensors.torch.save_file` refuses tensors that share memory, which client states often do (a thousand clients start
from the same zeros). `load_file` maps the file, so truncating it ends the process with a bus error. `write` uses the
library's own writer. `parse` reads untrusted bytes: it checks the whole header before it allocates a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, TensorSpec, serialize_file
from torch import Tensor

from fedlens.base.errors import DecodingError, one_line
from fedlens.base.parse_text import parse_json
from fedlens.core.device_copies import downloaded
from fedlens.files.atomic_files import create, open_readable
from fedlens.files.model_digest import contiguous, raw

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPES = frozenset(_DTYPES.values()) - {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
"""The dtypes that `write` supports. Other files may have two more; `fedlens.core.payload` writes those as bytes."""
_DIMENSIONS = 64  # PyTorch supports no more
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class Bounds:
    """Limits of `parse`, which are checked before memory is allocated.

    Attributes:
        size: bytes of the file or message. The tensors take the same amount again.
        header: bytes of the header, which is JSON and includes the metadata; by default the library's own limit.
        entries: values in the header, in lists, objects and metadata.
    """

    size: int = 2**40
    header: int = 100_000_000
    entries: int = 20_000_000


FILE = Bounds()
"""The bounds of files in the directories of runs, and of weights that a user names."""


@dataclass(frozen=True)
class Written:
    """The size of a file in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Contents:
    """The contents of a file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    written: Written


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sync: bool = True
) -> Written:
    """Writes a new safetensors file and, with `sync`, waits until the disk has it.

    `path` must not exist: the library replaces whatever has its name, even a device. Tensors may share memory, be
    strided, empty or without dimensions, and be on any device.
    Raises `OSError` if the file exists or the disk refuses, and `ValueError` for a dtype that the format does not have.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> write(path, {"w": torch.arange(3)}).size
    88
    >>> read(path).tensors
    {'w': tensor([0, 1, 2])}
    """
    plain: dict[
        str, Tensor
    ] = {}  # the specs hold addresses, so this memory must live until the file is written
    for name, tensor in downloaded(tensors).items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or name == "__metadata__":
            kind = f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
            raise ValueError(f"a safetensors file cannot hold '{name}' ({kind})")
        plain[name] = contiguous(tensor)
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in plain.items()
    }
    with open(create(path), "wb") as file:
        # What the umask allows; the library's own file, which replaces this one, is private.
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        serialize_file(specs, path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise ValueError(str(error)) from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    os.chmod(path, mode)
    if metadata and len(metadata) > 1:
        _sort_metadata(path)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return Written(os.fstat(file.fileno()).st_size, digest)


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file in memory, for a message: the same for equal tensors, with one copy of each.

    Raises `ValueError` for a dtype that the format does not have.

    >>> parse(to_bytes({"w": torch.arange(2)}, {"round": "7"}))
    ({'w': tensor([0, 1])}, {'round': '7'})
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    parts, end = [], 0
    for name, tensor in downloaded(tensors).items():
        kind = next((kind for kind, dtype in _DTYPES.items() if dtype == tensor.dtype), None)
        if kind is None or tensor.layout != torch.strided or name == "__metadata__":
            raise ValueError(f"a safetensors file cannot hold '{name}' ({tensor.layout} {tensor.dtype})")
        parts.append(raw(tensor))
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata by key: the library writes them in random order, so equal files would differ."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # Otherwise a character is escaped differently, and the tensors would have to move.
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def read(path: Path, bounds: Bounds = FILE) -> Contents:
    """Reads a safetensors file: every tensor on the CPU, in memory of its own, in the order of the names.

    Raises `OSError` if it cannot be read, and `DecodingError` as `parse` does. A flipped bit of a tensor is not
    detected here: compare `written.sha256`.
    """
    with open_readable(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, bounds, str(path))
        data = file.read(size)
    tensors, metadata = parse(data, bounds, str(path))
    return Contents(tensors, metadata, Written(len(data), hashlib.sha256(data).hexdigest()))


def parse(
    data: bytes | bytearray, bounds: Bounds = FILE, where: str = "message"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata in the bytes of a safetensors file; errors call the bytes `where`.

    Raises `DecodingError` if the bytes are not exactly one safetensors file, or if it is beyond a bound.

    >>> header = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    >>> parse(len(header).to_bytes(8, "little") + header + bytes([5, 7]))
    ({'w': tensor([5, 7], dtype=torch.uint8)}, {})
    >>> parse(len(header).to_bytes(8, "little") + header + bytes([5]))
    Traceback (most recent call last):
    fedlens.base.errors.DecodingError: not a whole safetensors file: its tensors have 2 bytes, and 1 follow the header
      (message); copy or send it again.
    """
    _check_size(len(data), bounds, where)
    start = 8 + _header_length(data[:8], bounds, where)
    if start > len(data):
        raise _damaged(f"its header is cut after {len(data) - 8} of {start - 8} bytes", where)
    header = _header(data[8:start], bounds, where)
    metadata = _metadata(header, where)
    spans = sorted((_span(name, entry, where) for name, entry in header.items()), key=lambda span: span[1:3])
    end = 0
    for span in spans:
        if span.start != end:
            raise _damaged(
                f"tensor {_quoted(span.key)} starts at byte {span.start}, and the one before ends at {end}",
                where,
            )
        end = span.end
    if end != len(data) - start:
        raise _damaged(f"its tensors have {end} bytes, and {len(data) - start} follow the header", where)
    view = memoryview(data)[start:]
    tensors = {span.key: _tensor(span, view) for span in sorted(spans)}
    return tensors, metadata


def read_metadata(path: Path, bounds: Bounds = FILE) -> dict[str, str]:
    """The metadata of a safetensors file, without its tensors; nothing is checked against a digest.

    Raises `OSError` if it cannot be read and `DecodingError` if it does not begin as a safetensors file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> _ = write(path, {"w": torch.arange(3)}, {"round": "7"})
    >>> read_metadata(path)
    {'round': '7'}
    """
    with open_readable(path) as file:
        text = file.read(_header_length(file.read(8), bounds, str(path)))
    return _metadata(_header(text, bounds, str(path)), str(path))


def nbytes_of(shape: Any, dtype: torch.dtype) -> int | None:
    """The bytes of a tensor of this shape, a value from untrusted JSON; None if it is not a valid shape.

    >>> nbytes_of([2, 3], torch.float32), nbytes_of([2, -3], torch.float32), nbytes_of([0, 2**70], torch.float32)
    (24, None, None)
    """
    if not isinstance(shape, list) or len(shape) > _DIMENSIONS:
        return None
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        return None
    # Zeros are left out, because PyTorch computes strides for an empty tensor too.
    fits = math.prod(max(extent, 1) for extent in shape) * dtype.itemsize < 2**63
    return math.prod(shape) * dtype.itemsize if fits else None


class _Span(NamedTuple):
    """A tensor of a file: its name, its bytes (counted from the end of the header), dtype and shape."""

    key: str
    start: int
    end: int
    dtype: torch.dtype
    shape: list[int]


def _span(key: str, entry: Any, where: str) -> _Span:
    name = _quoted(key)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(f"tensor {name} needs exactly dtype, shape and data_offsets", where)
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise _damaged(f"tensor {name} has the unknown dtype {one_line(json.dumps(kind))}", where)
    at_bytes = isinstance(offsets, list) and all(type(at) is int and 0 <= at < 2**63 for at in offsets)
    if not at_bytes or len(offsets) != 2:
        raise _damaged(f"tensor {name} needs two positions as data_offsets", where)
    size = nbytes_of(shape, dtype)
    if size is None or size != offsets[1] - offsets[0]:
        shown = one_line(json.dumps(shape))
        raise _damaged(
            f"tensor {name} has {offsets[1] - offsets[0]} bytes, not those of {kind} {shown}", where
        )
    return _Span(key, offsets[0], offsets[1], dtype, shape)


def _tensor(span: _Span, view: memoryview) -> Tensor:
    if span.start == span.end:  # `frombuffer` takes no empty buffer
        return torch.empty(span.shape, dtype=span.dtype)
    return torch.frombuffer(bytearray(view[span.start : span.end]), dtype=span.dtype).reshape(span.shape)


def _header_length(first: bytes | bytearray, bounds: Bounds, where: str) -> int:
    length = int.from_bytes(first, "little")
    if len(first) < 8:
        raise _damaged(f"it has {len(first)} bytes, and the length of its header alone takes 8", where)
    if length > bounds.header:
        raise _beyond(f"a header of {length:,} bytes", bounds.header, where)
    return length


def _header(text: bytes | bytearray, bounds: Bounds, where: str) -> dict[str, Any]:
    # Counted before parsing: in memory, a value takes many times the size of its text.
    entries = sum(map(text.count, (b",", b"[", b"{")))
    if entries > bounds.entries:
        raise _beyond(f"up to {entries:,} values in the header", bounds.entries, where)
    try:
        header = parse_json(text) if text.startswith(b"{") else None
    except ValueError as error:
        raise _damaged(f"its header is not JSON ({one_line(str(error))})", where) from None
    if not isinstance(header, dict):
        raise _damaged("its header is not a JSON object", where)
    return header


def _metadata(header: dict[str, Any], where: str) -> dict[str, str]:
    """Takes the metadata out of a header."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged("its metadata are not texts by name", where)
    return metadata


def _quoted(name: str) -> str:
    return repr(one_line(name))


def _check_size(size: int, bounds: Bounds, where: str) -> None:
    if size > bounds.size:
        raise _beyond(f"{size:,} bytes", bounds.size, where)


def _damaged(what: str, where: str) -> DecodingError:
    return DecodingError(f"not a whole safetensors file: {what}", where=where, hint="copy or send it again")


def _beyond(what: str, bound: int, where: str) -> DecodingError:
    return DecodingError(
        f"it has {what}, and at most {bound:,} are accepted", where=where, hint="split what it holds"
    )
