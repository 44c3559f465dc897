"""Masks of vectors of words: AES-256 in counter mode as the pseudorandom generator of ePrint 2017/281."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable

Words = NDArray[np.unsignedinteger]
_CHUNK = 1 << 17  # bytes of a mask in memory: the cache of a core holds them and the words that get them
_KEYS = 64  # masks that are added to a chunk before the next one


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

    zeros, stream = bytes(_CHUNK), np.empty(_CHUNK // words.itemsize, words.dtype.newbyteorder("<"))
    memory, keys = memoryview(stream.view(np.uint8).data), iter(signed_keys)
    while some := [
        (Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor(), sign)
        for key, sign in islice(keys, _KEYS)
    ]:
        for start in range(0, len(words), len(stream)):
            part = words[start : start + len(stream)]
            plain, sent, mask = memoryview(zeros)[: part.nbytes], memory[: part.nbytes], stream[: len(part)]
            for encryptor, sign in some:
                encryptor.update_into(plain, sent)
                (np.add if sign > 0 else np.subtract)(part, mask, out=part)
