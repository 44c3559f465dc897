"""The digest of a model: of its weights, and of a model file with its metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

DIGEST = "fedlens.digest"
"""The name of the digest in the metadata of a model file."""


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor in row-major order on the CPU, without history; the same memory where it already is.

    >>> contiguous(torch.ones(2, 3, requires_grad=True).T).stride()
    (2, 1)
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if plain.stride() != (1,):  # a tensor of one element calls itself contiguous whatever its stride
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.reshape(tensor.shape)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: a view of its memory where it is contiguous and on the CPU.

    >>> bytes(raw(torch.tensor([1, 256], dtype=torch.int16)))
    b'\\x01\\x00\\x00\\x01'
    """
    return contiguous(tensor).reshape(-1).view(torch.uint8).numpy().data


def weights_digest(tree: Mapping[str, Tensor]) -> str:
    """SHA-256, as hex, over the names, dtypes, shapes and bytes of a tree, in the order of the names.

    Two trees have the same digest if they are equal bit for bit, whatever their devices and strides.

    >>> weights_digest({"w": torch.zeros(2)})[:16]
    '958fa745ba8382d5'
    >>> weights_digest({"w": torch.zeros(2)}) == weights_digest({"w": torch.zeros(2, 1)})
    False
    """
    digest = hashlib.sha256()
    for name in sorted(tree):
        tensor = tree[name]
        # The line determines how many bytes follow it, so no two trees give the same stream.
        line = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        digest.update(line.encode() + b"\n")
        digest.update(raw(tensor))
    return digest.hexdigest()


def model_digest(tree: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256, as hex, of a model file's weights and of its metadata, without the digest itself.

    >>> model_digest({"w": torch.zeros(2)}, {"classes": "[]"})[:16]
    '3ad5c61398b0784e'
    """
    text = json.dumps([weights_digest(tree), dict(metadata)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
