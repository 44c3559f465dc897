"""Writes small datasets in exactly the layouts in which the large ones are published."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from fedlens.data.datasets import cifar, idx


def idx_bytes(array: np.ndarray, magic: int) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, what: idx.IdxRelease, suffix: str = "") -> dict[str, np.ndarray]:
    """The four files of MNIST's layout with `what.counts` images; the arrays by file name."""
    rng = np.random.default_rng(0)
    folder = root / what.folder
    folder.mkdir(parents=True)
    written = {}
    for at, file in enumerate(idx.FILES):
        count = what.counts[at // 2]
        images = at % 2 == 0
        array = rng.integers(0, 256, (count, 28, 28)) if images else np.arange(count) % len(what.classes)
        content = idx_bytes(array, 2051 if images else 2049)
        path = folder / (file + suffix)
        path.write_bytes(gzip.compress(content) if suffix == ".gz" else content)
        written[file] = array
    return written


def cifar_batches(what: cifar.CifarRelease) -> list[tuple[np.ndarray, np.ndarray]]:
    """(pixels, labels) of each training file, then of the test file."""
    rng = np.random.default_rng(1)
    each = what.counts[0] // len(what.binary.train)
    counts = [each] * len(what.binary.train) + [what.counts[1]]
    return [
        (rng.integers(0, 256, (n, 3072)).astype(np.uint8), rng.integers(0, len(what.classes), n))
        for n in counts
    ]


def write_cifar_binary(root: Path, what: cifar.CifarRelease) -> None:
    folder = root / what.binary.folder
    folder.mkdir(parents=True)
    for file, (pixels, labels) in zip(
        (*what.binary.train, what.binary.test), cifar_batches(what), strict=True
    ):
        coarse = [(labels % 7)[:, None]] if what.label_bytes == 2 else []
        records = np.concatenate([*coarse, labels[:, None], pixels], axis=1).astype(np.uint8)
        (folder / file).write_bytes(records.tobytes())


def write_cifar_python(root: Path, what: cifar.CifarRelease) -> None:
    folder = root / what.python.folder
    folder.mkdir(parents=True)
    for file, (pixels, labels) in zip(
        (*what.python.train, what.python.test), cifar_batches(what), strict=True
    ):
        entries = {"data": array_opcodes(pixels), what.label_key: list_opcodes(labels.tolist())}
        (folder / file).write_bytes(pickle_of(entries))


def pickle_of(entries: dict[str, bytes]) -> bytes:
    """A dictionary as Python 2 pickled it in protocol 2, which is how CIFAR was published."""
    body = b"".join(text_opcodes(key.encode()) + value for key, value in entries.items())
    return b"\x80\x02}(" + body + b"u."


def text_opcodes(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text


def list_opcodes(numbers: list[int]) -> bytes:
    return b"](" + b"".join(b"J" + struct.pack("<i", number) for number in numbers) + b"e"


def array_opcodes(array: np.ndarray) -> bytes:
    """A two-dimensional uint8 array, opcode for opcode as an old NumPy reduced it."""
    made = (
        b"cnumpy.core.multiarray\n_reconstruct\n"
        + b"cnumpy\nndarray\n"
        + b"K\x00\x85"
        + text_opcodes(b"b")
        + b"\x87R"
    )
    shape = b"J" + struct.pack("<i", array.shape[0]) + b"J" + struct.pack("<i", array.shape[1]) + b"\x86"
    kind = b"cnumpy\ndtype\n" + text_opcodes(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + text_opcodes(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return made + b"(K\x01" + shape + kind + b"\x89" + text_opcodes(array.tobytes()) + b"tb"
