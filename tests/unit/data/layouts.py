"""Writes small datasets in exactly the layouts in which the large ones are published."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.data.catalogue import CATALOGUE, DatasetFacts

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def with_facts(monkeypatch: pytest.MonkeyPatch, name: str, **facts: Any) -> DatasetFacts:
    """Changes facts of a dataset in the catalogue, say to smaller splits, and returns all of its facts."""
    changed = replace(CATALOGUE[name], **facts)
    monkeypatch.setitem(CATALOGUE, name, changed)
    return changed


def idx_bytes(array: np.ndarray, magic: int) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, facts: DatasetFacts, suffix: str = "") -> dict[str, np.ndarray]:
    """The four files of MNIST's layout with the counts of `facts`; the arrays by file name."""
    rng = np.random.default_rng(0)
    written = {}
    for at, pattern in enumerate(facts.files[0]):
        path = root / (pattern.split("|")[0] + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        count = (facts.train, facts.test)[at // 2] or 0
        images = at % 2 == 0
        array = rng.integers(0, 256, (count, 28, 28)) if images else np.arange(count) % len(facts.labels)
        content = idx_bytes(array, 2051 if images else 2049)
        path.write_bytes(gzip.compress(content) if suffix == ".gz" else content)
        written[IDX_FILES[at]] = array
    return written


def cifar_batches(facts: DatasetFacts) -> list[tuple[np.ndarray, np.ndarray]]:
    """(pixels, labels) of each training file, then of the test file."""
    rng = np.random.default_rng(1)
    files = len(facts.files[0]) - 1
    counts = [(facts.train or 0) // files] * files + [facts.test or 0]
    return [
        (rng.integers(0, 256, (n, 3072)).astype(np.uint8), rng.integers(0, len(facts.labels), n))
        for n in counts
    ]


def write_cifar_binary(root: Path, facts: DatasetFacts) -> None:
    for file, (pixels, labels) in zip(facts.files[0], cifar_batches(facts), strict=True):
        coarse = [(labels % 7)[:, None]] if facts.name == "cifar100" else []
        records = np.concatenate([*coarse, labels[:, None], pixels], axis=1).astype(np.uint8)
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(records.tobytes())


def write_cifar_python(root: Path, facts: DatasetFacts) -> None:
    key = "fine_labels" if facts.name == "cifar100" else "labels"
    for file, (pixels, labels) in zip(facts.files[1], cifar_batches(facts), strict=True):
        entries = {"data": array_opcodes(pixels), key: list_opcodes(labels.tolist())}
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(pickle_of(entries))


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
