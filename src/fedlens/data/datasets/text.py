"""Text as numbers: characters of a fixed vocabulary, and words."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

# LEAF's vocabulary for Shakespeare: an id is a position in it.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
SPACE = LETTERS.index(" ")
LETTER_NAMES = tuple({"\n": "newline", " ": "space"}.get(letter, letter) for letter in LETTERS)

_NONE = -1
_IDS = np.full(129, _NONE, np.int16)  # by code point; the last entry is for all from 128 on
_IDS[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
_WORDS = re.compile(r"[\w']+|[.,!?;]")


def letter_ids(text: str) -> tuple[NDArray[np.int16], int]:
    """(ids int16 [len(text)], how many were unknown): each character's position in `LETTERS`.

    A character that the vocabulary lacks becomes a space, as LEAF itself uses for an absent character.
    (LEAF's own look-up gives -1, which its one-hot code turns into the last letter.)

    >>> letter_ids("To é")
    (array([44, 67,  1,  1], dtype=int16), 1)
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    ids = _IDS[np.minimum(points, len(_IDS) - 1)]
    unknown = ids == _NONE
    ids[unknown] = SPACE
    return ids, int(unknown.sum())


def words(text: str) -> list[str]:
    """The words of a text, as LEAF splits them, in small letters.

    A word is a run of letters, digits, underscores and apostrophes; each of . , ! ? ; stands alone; everything
    else parts words and is dropped.

    >>> words("I don't @know... :-)")
    ['i', "don't", 'know', '.', '.', '.']
    """
    return _WORDS.findall(text.lower())
