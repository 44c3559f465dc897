"""Penn Treebank, character by character, in the vocabulary of `shakespeare`: to pre-train for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import damaged, locate, published, read_lines
from fedlens.data.datasets.text import LETTER_NAMES, letter_ids

# The text writes <unk> for a rare word, and the vocabulary has no "<".
BRACKETS = str.maketrans("<>", "[]")


def penn_treebank(
    root: Path,
    download: bool,
    seed: int,
    *,
    length: Annotated[int, Field(ge=1, le=10_000, description="characters of an input")] = 80,
    stride: Annotated[
        int, Field(ge=1, le=10_000, description="characters between the starts of two inputs")
    ] = 20,
) -> Dataset:
    """Penn Treebank as Mikolov prepared it: the next character of newspaper text; `seed` plays no part.

    It is what chen2022 (appendix C.1) pre-trains a model on for `shakespeare`, so a model fits both: inputs
    int16 [n, length] and targets int64 [n] are ids in the same vocabulary of 80 characters
    (`fedlens.data.datasets.text.LETTERS`). Lines are stripped and joined by a newline; `<unk>`, which stands
    for a rare word, becomes `[unk]`; every other character that the vocabulary lacks ($ # * / and the
    backslash) becomes a space, and the notes say how many did. The paper does not say how it cut the text:
    here an input is `length` characters, its target is the one after it, and the next input starts `stride`
    characters later. The 5 million training characters give about 250,000 inputs with the stride 20, which
    take 160 MB, and 20 times as many with the stride 1.

    Reads `ptb.train.txt` and `ptb.test.txt`, or else `ptb.char.train.txt` and `ptb.char.test.txt` (the same
    text with a blank after each character and _ for a blank), in `root/PennTreebank`, `root/penn-treebank`
    or `root/simple-examples/data`. The validation file is not read: `data.validation` holds out a share of
    the training data. There are no clients in it.

    Source: Marcus, Santorini, Marcinkiewicz 1993, Building a large annotated corpus of English: the Penn
    Treebank; Mikolov et al. 2010.

    Raises `DataError` if the files are missing, are no text, or are shorter than one input.

    >>> inputs, targets = windows(np.arange(7, dtype=np.int16), length=3, stride=2)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [2, 3, 4]], [3, 5])
    """
    splits, unknown = [], 0
    for path in locate("penn-treebank", root, download):
        ids, count = letter_ids(read_text(path))
        unknown += count
        if len(ids) <= length:
            what = f"the text has {len(ids)} characters, and an input with its target takes {length + 1}"
            raise damaged(what, path, hint="set data.dataset.length lower, or fetch the file again")
        splits.append(Examples(*windows(ids, length, stride)))
    notes = [f"read {unknown:,} characters that the vocabulary lacks as spaces"] if unknown else []
    return published("penn-treebank", splits, LETTER_NAMES, notes=notes, vocabulary=len(LETTER_NAMES))


def read_text(path: Path) -> str:
    """The text of a file, its lines stripped, each with a newline at its end, `<` and `>` as `[` and `]`."""
    lines = read_lines(path)
    if path.name.startswith("ptb.char."):
        lines = [line.replace(" ", "").replace("_", " ") for line in lines]
    return "".join(f"{line.strip()}\n" for line in lines).translate(BRACKETS)


def windows(ids: NDArray[np.int16], length: int, stride: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(inputs int16 [n, length], targets int64 [n]): pieces of a text, and the character after each."""
    inputs = sliding_window_view(ids[:-1], length)[::stride].copy()
    return inputs, ids[length::stride].astype(np.int64)
