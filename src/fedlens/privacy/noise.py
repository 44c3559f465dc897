"""Random numbers from a cryptographic generator, for noise and cohorts that nobody may predict.

Who sees 624 outputs of a Mersenne twister knows all that follow, and a round of an empty cohort publishes nothing but
noise. Noise for privacy comes from AES-256 in counter mode.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fedlens.base.errors import ConfigError

if TYPE_CHECKING:  # settings are checked without torch
    from torch import Tensor

KEY_BYTES = 32
_CHUNK = 1 << 15  # numbers at a time, which stay in a processor's cache


class KeyedStream:
    """Uniform and normal float64 numbers from the stream of AES-256-CTR under a key of 256 bits.

    The same key gives the same numbers in the same order of calls. A key is for one stream: the counter starts at 0.

    Uniforms have 53 random bits. Normals are those of Box and Muller, whose largest is 8.57; where they are rounded to
    floating-point numbers, the guarantee of differential privacy is that of real numbers up to rounding
    (Mironov 2012, "On significance of the least significant bits for differential privacy").

    Args:
        key: 32 bytes; `os.urandom(32)` for numbers that are to be secret.

    Raises `ConfigError` if the package `cryptography` is not installed, and `ValueError` for a key of another length.

    >>> stream = KeyedStream(bytes(32))
    >>> stream.uniform(2)
    tensor([0.5373, 0.5278], dtype=torch.float64)
    >>> f"{float(stream.normal(10_000).std()):.1f}"
    '1.0'
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes, not {KEY_BYTES}")
        self._encryptor = _encryptor(key)

    def uniform(self, n: int) -> Tensor:
        """float64 [n] in [0, 1)."""
        import numpy as np
        import torch

        words = torch.from_numpy(np.frombuffer(bytearray(self._encryptor.update(bytes(8 * n))), np.int64))
        # Of each word the upper 53 bits, as a whole number that float64 holds exactly.
        return words.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)

    def normal(self, n: int) -> Tensor:
        """float64 [n] of mean 0 and deviation 1."""
        import torch

        drawn = torch.empty(n, dtype=torch.float64)
        for at in range(0, n, _CHUNK):
            part = drawn[at : at + _CHUNK]
            half = (len(part) + 1) // 2
            # 1 - u is in (0, 1], so that its logarithm is finite.
            length = self.uniform(half).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
            angle = self.uniform(half).mul_(2 * math.pi)
            part[:half] = length * angle.cos()
            part[half:] = (length * angle.sin_())[: len(part) - half]
        return drawn

    def __repr__(self) -> str:
        return "KeyedStream(...)"


def _encryptor(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        raise ConfigError(
            "noise for privacy needs the package cryptography, which is not installed",
            where="privacy.noise",
            hint="run: pip install 'fedlens[privacy]'",
        ) from None
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
