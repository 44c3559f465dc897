"""Masks of vectors of words: AES-256 in counter mode as the pseudorandom generator of ePrint 2017/281."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable

Words = NDArray[np.unsignedinteger]
_CHUNK = (
    1 << 17
)  # bytes of a mask in memory: the cache of a core holds them, and the chunk that they are added to


def add_masks(words: Words, signed_keys: Iterable[tuple[bytes, int]]) -> None:
    """Adds PRG(key), or subtracts it where the sign is -1, to `words` in place, for each key and sign.

    Words are unsigned, so the sum is modulo 2^32 or 2^64, whatever the processor. The mask is AES-256-CTR of zeros,
    from counter 0: a key is used for one vector only. The memory is that of one chunk.

    >>> words = np.array([1, 2, 3], dtype=np.uint32)
    >>> add_masks(words, [(bytes(32), 1)])
    >>> add_masks(words, [(bytes(32), -1)])
    >>> words
    array([1, 2, 3], dtype=uint32)
    """
    # Here, because only secure sums need the package.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    size = words.itemsize
    zeros, stream = bytes(_CHUNK), np.empty(_CHUNK // size, dtype=words.dtype.newbyteorder("<"))
    memory = memoryview(stream.view(np.uint8).data)
    for key, sign in signed_keys:
        encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        add = np.add if sign > 0 else np.subtract
        for start in range(0, len(words), len(stream)):
            part = words[start : start + len(stream)]
            encryptor.update_into(memoryview(zeros)[: len(part) * size], memory[: len(part) * size])
            add(part, stream[: len(part)], out=part)
