"""Named tensors in a safetensors file, written and read in one pass with its SHA-256.

The format is safetensors (any safetensors reader opens these files); its own library is not used for two
reasons. It maps the file into memory when it reads, so that a file cut short under a running process ends it
with a bus error; and it refuses tensors that share memory, which a federation's states do all the time (a
thousand clients that start from the same zeros). Here a tensor's bytes go from its own memory to the file,
and from the file to its own memory, through the hash and through no copy.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """What a file has: its size in bytes and its SHA-256 as hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Contents:
    """What was in a file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    written: Written


@dataclass(frozen=True)
class _Slot:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: a view of its memory where it is contiguous and on the CPU.

    >>> bytes(raw(torch.tensor([1, 256], dtype=torch.int16)))
    b'\\x01\\x00\\x00\\x01'
    """
    plain = tensor.detach() if tensor.requires_grad else tensor
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # one element that calls itself contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, sync: bool = True
) -> Written:
    """Write a safetensors file and, with `sync`, wait until the disk has it.

    Tensors may share memory, be strided, empty or without dimensions, and lie on any device.
    Raises `OSError` where the disk refuses and `ValueError` for a dtype that the format does not have.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> write(path, {"w": torch.arange(3)}).size
    88
    >>> read(path).tensors
    {'w': tensor([0, 1, 2])}
    """
    # Wide types first keeps every tensor aligned to its own width, as readers that map the file want it.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header = _header(names, tensors, metadata or {})
    digest = hashlib.sha256(header)
    size = len(header)
    with open(path, "wb") as file:
        file.write(header)
        for name in names:
            data = raw(tensors[name])
            digest.update(data)
            file.write(data)
            size += data.nbytes
        file.flush()
        if sync:
            os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def _header(names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    # Built as text: a hundred thousand small dictionaries would spend their time in the garbage collector.
    rows = [f'"__metadata__":{json.dumps(dict(metadata))}'] if metadata else []
    start = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in CODES or tensor.layout != torch.strided or name == "__metadata__":
            kind = f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
            raise ValueError(f"a safetensors file cannot hold '{name}' ({kind})")
        stop = start + tensor.numel() * tensor.element_size()
        shape = ",".join(map(str, tensor.shape))
        row = f'"dtype":"{CODES[tensor.dtype]}","shape":[{shape}],"data_offsets":[{start},{stop}]'
        rows.append(f"{json.dumps(name)}:{{{row}}}")
        start = stop
    text = f"{{{','.join(rows)}}}".encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> Contents:
    """Read a safetensors file whole: every tensor on the CPU, in memory of its own.

    Raises `OSError` where it cannot be read and `ValueError` where it is not a whole safetensors file. A
    flipped bit does not show here: compare `written.sha256`.
    """
    digest = hashlib.sha256()
    tensors: dict[str, Tensor] = {}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = _read_header(file, size)
        digest.update(len(text).to_bytes(8, "little") + text)
        slots, metadata = _parse_header(text, size - 8 - len(text))
        for slot in slots:
            try:
                tensor = torch.empty(slot.shape, dtype=slot.dtype)
            except (
                RuntimeError,
                TypeError,
                OverflowError,
            ) as error:  # (0, 2**70): no bytes, and yet too large
                raise ValueError(f"impossible shape {slot.shape}") from error
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            if file.readinto(data) != data.nbytes:
                raise ValueError("the file ends too early")
            digest.update(data)
            tensors[slot.name] = tensor
    return Contents(tensors, metadata, Written(size, digest.hexdigest()))


def _read_header(file: BufferedReader, size: int) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError("the file ends too early")
    return file.read(length)


def _parse_header(text: bytes, size: int) -> tuple[list[_Slot], dict[str, str]]:
    try:
        table = json.loads(text)
        metadata = {str(key): str(value) for key, value in table.pop("__metadata__", {}).items()}
        slots = [
            _Slot(name, DTYPES[row["dtype"]], tuple(map(int, row["shape"])), *map(int, row["data_offsets"]))
            for name, row in table.items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError("its header cannot be read") from error
    slots.sort(key=lambda slot: (slot.start, slot.stop))
    end = 0
    for slot in slots:
        fits = slot.start == end and slot.stop - slot.start == math.prod(slot.shape) * slot.dtype.itemsize
        if not fits or min(slot.shape, default=0) < 0:
            raise ValueError(f"its header does not fit its data at '{slot.name}'")
        end = slot.stop
    if end != size:
        raise ValueError(f"its header speaks of {end} bytes of data, and it has {size}")
    return slots, metadata
