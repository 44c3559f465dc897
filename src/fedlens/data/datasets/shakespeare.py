"""Shakespeare's plays by role, in LEAF's JSON files: eighty characters, and the one that comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from zlib import crc32

import numpy as np
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.dataset_files import published
from fedlens.data.datasets.leaf import Converted, User, by_user, split_folders
from fedlens.data.datasets.text import LETTER_NAMES, letter_ids

LENGTH = 80
HALVES = ("first-half", "second-half")


def shakespeare(
    root: Path,
    download: bool,
    seed: int,
    *,
    roles: Annotated[
        Literal["all", "first-half", "second-half"],
        Field(description="all roles, or one of two fixed halves: pre-train on one, federate the other"),
    ] = "all",
) -> Dataset:
    """Shakespeare from `root/shakespeare/{train,test}/*.json`: next character, by role; `seed` plays no part.

    Inputs are int16 [n, 80], targets int64 [n]: ids of characters, positions in LEAF's vocabulary of 80
    (`fedlens.data.datasets.text.LETTERS`). A character outside it is read as a space, and the notes say how
    many were. Columns: `client` and `role`, both LEAF's user, `<PLAY>_<ROLE>`.

    LEAF's whole set has 1,129 roles and 4.2 million examples, which take 0.6 kB each here: sample it, as LEAF
    does by default, if that is too much (`--sf 0.1`).

    The half of a role is the parity of the CRC-32 of its name. It depends on no seed and on no other role, so a
    pre-training on `roles = "first-half"` has no role in common with any run on `"second-half"`.

    Source: Caldas et al. 2018, LEAF, arXiv 1812.01097, after McMahan et al. 2017; chen2022 appendix C.1.

    Raises `DataError` if the files are missing (they are made by LEAF's script, not fetched) or broken, an
    input is not a text of 80 characters, a target not one character, or the half has no role.

    >>> LETTER_NAMES[:4], len(LETTER_NAMES)
    (('newline', 'space', '!', '"'), 80)
    """
    unknown = 0

    def convert(user: User) -> Converted:
        nonlocal unknown
        inputs, targets, count = _texts(user)
        unknown += count
        return inputs, targets

    splits = []
    for folder in split_folders(root, "shakespeare"):
        part = by_user(folder, convert, "role")
        if roles != "all":
            part = part.take(np.flatnonzero([half_of(role) == roles for role in part.columns["role"]]))
        if not len(part):
            hint = "set data.dataset.roles = 'all', or sample more roles with LEAF's preprocess.sh"
            raise DataError(f"none of the roles is in the {roles}", where=str(folder), hint=hint)
        splits.append(part)
    notes = [f"read {unknown:,} characters that LEAF's vocabulary lacks as spaces"] if unknown else []
    return published("shakespeare", splits, LETTER_NAMES, notes=notes, vocabulary=len(LETTER_NAMES))


def half_of(role: str) -> str:
    """The half of the roles that this one is in, "first-half" or "second-half".

    >>> half_of("MENENIUS"), half_of("ROMEO")
    ('first-half', 'second-half')
    """
    return HALVES[crc32(role.encode()) % 2]


def _texts(user: User) -> tuple[np.ndarray, np.ndarray, int]:
    """(int16 [n, 80], int64 [n], how many characters were unknown) of one role."""
    for at, (text, following) in enumerate(zip(user.x, user.y, strict=True)):
        for value, size, what in ((text, LENGTH, "an input"), (following, 1, "a target")):
            if not isinstance(value, str):
                raise user.fault(at, f"has {what} that is not text")
            if len(value) != size:
                raise user.fault(at, f"has {what} of {len(value)} characters, and {size} are expected")
    inputs, unknown = letter_ids("".join(user.x))
    targets, more = letter_ids("".join(user.y))
    return inputs.reshape(-1, LENGTH), targets.astype(np.int64), unknown + more
