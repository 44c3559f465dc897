"""The fingerprint of a site in eight words, which two people compare on the telephone."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

WORDS = 8


@cache
def word_list() -> tuple[str, ...]:
    """2,048 words of four to eight letters; the first four letters of each are its own."""
    return tuple((files("fedlens.identity") / "words.txt").read_text("ascii").split())


def fingerprint_words(root: bytes, identity: bytes) -> str:
    """Eight words of 11 bits each that stand for a site and the federation that it joined.

    Both ends compute them of SHA-256(tag || SHA-256 of the root certificate || SHA-256 of the identity key). So one
    comparison finds a stranger's key at the server, and an invitation into a stranger's federation at the site.

    Args:
        root: the root certificate in DER.
        identity: the fingerprint of the identity key, 32 bytes.

    >>> fingerprint_words(b"root", bytes(32))
    'gnome skyline trifle copper explore flexible yogurt faucet'
    """
    digest = hashlib.sha256(b"fedlens-words-1\0" + hashlib.sha256(root).digest() + identity).digest()
    number = int.from_bytes(digest[: WORDS * 11 // 8], "big")
    return " ".join(word_list()[number >> 11 * (WORDS - 1 - k) & 2047] for k in range(WORDS))


def same_words(given: str, words: str) -> bool:
    """Whether a person has written these words; the first four letters of each are enough.

    >>> same_words("Gnome, sky", "gnome skyline"), same_words("gnom skyl", "gnome skyline")
    (False, True)
    """
    typed, meant = given.lower().replace(",", " ").split(), words.split()
    return len(typed) == len(meant) and all(
        len(each) >= 4 and word.startswith(each) for each, word in zip(typed, meant, strict=True)
    )
