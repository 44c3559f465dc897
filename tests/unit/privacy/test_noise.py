"""The stream of random numbers: the bytes of AES, the shapes of the distributions, and no repetition."""

import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlens.base.errors import ConfigError
from fedlens.privacy.noise import KeyedStream

KEY = bytes(range(32))


def test_uniforms_are_the_upper_bits_of_the_encrypted_counter() -> None:
    blocks = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()  # block by block, to compare
    stream = b"".join(blocks.update(count.to_bytes(16, "big")) for count in range(500))
    expected = [(word >> 11) * 2.0**-53 for word in np.frombuffer(stream, np.uint64).tolist()]
    drawn = KeyedStream(KEY)
    parts = [drawn.uniform(n) for n in (1, 0, 500, 499)]
    assert torch.cat(parts).tolist() == expected
    assert all(part.dtype == torch.float64 for part in parts)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1 << 15, (1 << 15) + 1])
def test_any_number_of_normals_can_be_drawn(n: int) -> None:
    drawn = KeyedStream(KEY).normal(n)
    assert drawn.shape == (n,)
    assert drawn.isfinite().all()
    assert len(set(drawn.tolist())) == n


def test_normals_have_the_moments_and_the_tails_of_a_normal() -> None:
    z = KeyedStream(KEY).normal(400_000)
    moments = [float((z**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.03)
    beyond = [float((z.abs() > at).double().mean()) for at in (1, 2, 3)]
    assert beyond == pytest.approx([0.31731, 0.0455, 0.0027], abs=3e-3)
    assert abs(float((z[:-1] * z[1:]).mean())) < 0.01
    assert (
        abs(float((z[: 1 << 14] * z[1 << 14 : 1 << 15]).mean())) < 0.04
    )  # both of a pair, by cosine and sine


def test_a_key_has_256_bits_and_is_never_shown() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 32"):
        KeyedStream(bytes(16))
    assert repr(KeyedStream(KEY)) == "KeyedStream(...)"


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedlens\[privacy\]'"):
        KeyedStream(KEY)
