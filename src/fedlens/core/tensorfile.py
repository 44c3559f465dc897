"""Safetensors files with their SHA-256: tensors may share memory, and nothing read from disk stays mapped.

`safetensors.torch.save_file` refuses tensors that share memory, which the states of a federation do all the time (a
thousand clients start from the same zeros), and `load_file` maps the file, so that a file truncated under a running
process ends the process with a bus error. The functions here use the library's own writer and its reader from bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, TensorSpec, serialize_file
from safetensors.torch import load
from torch import Tensor

from fedlens.core.atomic_files import create, open_readable, read_regular
from fedlens.core.model_digest import contiguous
from fedlens.core.parse_text import parse_json
from fedlens.core.transfers import downloaded

DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32,
        torch.uint16, torch.uint8, torch.bool,
    }
)  # fmt: skip
_LONGEST_HEADER = 100_000_000  # bytes, as the library has it
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


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


def _sort_metadata(path: Path) -> None:
    """Puts the metadata in the order of its keys: the library writes them in a random one, so no two files agree."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if (
            len(text) <= length
        ):  # else a character is escaped in another way, and the tensors would have to move
            file.seek(8)
            file.write(text.ljust(length))


def read(path: Path) -> Contents:
    """Reads a safetensors file: every tensor on the CPU, in memory of its own, in the order of the names.

    Raises `OSError` if it cannot be read and `ValueError` if it is not a whole safetensors file. A flipped bit is
    not detected here: compare `written.sha256`.
    """
    data = read_regular(path)
    try:
        tensors = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, RuntimeError, KeyError, OverflowError) as error:
        raise ValueError(f"not a whole safetensors file ({error})") from error
    metadata = {str(key): str(value) for key, value in header.get("__metadata__", {}).items()}
    written = Written(len(data), hashlib.sha256(data).hexdigest())
    return Contents({name: tensors[name] for name in sorted(tensors)}, metadata, written)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, without its tensors; nothing is checked against a digest.

    Raises `OSError` if it cannot be read and `ValueError` if it does not begin as a safetensors file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> _ = write(path, {"w": torch.arange(3)}, {"round": "7"})
    >>> read_metadata(path)
    {'round': '7'}
    """
    with open_readable(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = parse_json(file.read(length))
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(key): str(value) for key, value in metadata.items()}
