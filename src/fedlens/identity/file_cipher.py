"""Encrypts files of a site with AES-256-GCM, under a key that derives from its identity key."""

from __future__ import annotations

import os

from fedlens.base.errors import DecodingError, RunFailed
from fedlens.identity.keys import KeyPair  # says which extra is missing
from fedlens.identity.signing import signed_bytes

from cryptography.exceptions import InvalidTag  # isort: skip
from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # isort: skip

_NONCE = 12
_MOST = 2**31 - 64  # bytes of one text, which the library limits


class FileCipher:
    """Encrypts the files of one site. Only its identity key opens them, each for what it was written for.

    Args:
        key: the identity key.

    >>> cipher = FileCipher(KeyPair.make())
    >>> sealed = cipher.seal(b"shares", "log", "ward-a")
    >>> cipher.open(sealed, "log", "ward-a"), len(sealed)
    (b'shares', 34)
    """

    def __init__(self, key: KeyPair) -> None:
        self._cipher = AESGCM(key.derived("files"))

    def seal(self, content: bytes, *purpose: str) -> bytes:
        """The encrypted content, with a nonce of 12 bytes before it and a tag of 16 bytes behind.

        Args:
            purpose: what the file is for, and whose: `open` needs the same. It is not in the file.

        Raises `RunFailed` for 2 GiB and more.
        """
        if len(content) > _MOST:
            what = f"{len(content):,} bytes cannot be encrypted as one file, and at most {_MOST:,} can"
            raise RunFailed(what, where=purpose[0], hint="train a smaller model")
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, content, signed_bytes("file", purpose))

    def open(self, sealed: bytes, *purpose: str) -> bytes:
        """The content. Raises `DecodingError` if this key did not seal it for this purpose, or it was changed."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], signed_bytes("file", purpose))
        except (InvalidTag, ValueError):
            what = "it was changed, or is another file, or another identity key wrote it"
            raise DecodingError(what, where=purpose[0], hint="restore it from a backup") from None
