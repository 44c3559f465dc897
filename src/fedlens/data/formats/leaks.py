"""Finds images that are in more than one split."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedlens.data.diagnostics import Findings
from fedlens.data.images import decode_threads

_FIRST = 3  # pairs that are named


def check_leaks(root: Path, names: Sequence[str], splits: Sequence[str], findings: Findings) -> None:
    """Adds to `findings`, as one of the whole set, how many images are in more than one split, and the first few.

    An image is in two splits where one file is, or where two files have the same content; see `same_content`.
    """
    groups = same_content(root, names, splits)
    if not groups:
        return
    told = []
    for group in groups[:_FIRST]:
        first, *others = sorted(group, key=lambda row: splits[row] != "train")
        second = next(row for row in others if splits[row] != splits[first])
        of = f"'{names[first]}' ({splits[first]})"
        told.append(
            f"{of} is in {splits[second]} too"
            if names[first] == names[second]
            else f"{of} is the same as '{names[second]}' ({splits[second]})"
        )
    rest = f", and {len(groups) - _FIRST:,} more" if len(groups) > _FIRST else ""
    findings.add(
        root,
        f"{_images(len(groups))} in more than one split, a leak: {', '.join(told)}{rest}",
        "keep each in one split only",
        example=False,
    )


def same_content(root: Path, names: Sequence[str], splits: Sequence[str]) -> list[list[int]]:
    """Groups of rows that have the same image and are not all in one split, in the order of their first rows.

    Files of one size that occurs in several splits are compared by SHA-256; all other files are only asked for
    their size. Files that cannot be read are passed over.
    """
    sizes = {name: _size(root / name) for name in dict.fromkeys(names)}
    seen: defaultdict[int | None, set[str]] = defaultdict(set)
    for name, split in zip(names, splits, strict=True):
        seen[sizes[name]].add(split)
    doubtful = [name for name, size in sizes.items() if size and len(seen[size]) > 1]
    digests = dict(zip(doubtful, _digests(root, doubtful), strict=True))
    groups: defaultdict[str | bytes, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        if (digest := digests.get(name)) is not None:
            groups[digest].append(row)
    return [rows for rows in groups.values() if len({splits[row] for row in rows}) > 1]


def _digests(root: Path, names: Iterable[str]) -> Iterable[bytes | None]:
    def one(name: str) -> bytes | None:
        try:
            with (root / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except OSError:
            return None

    with ThreadPoolExecutor(decode_threads()) as pool:
        return list(pool.map(one, names))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _images(count: int) -> str:
    return f"{count:,} images are" if count > 1 else "1 image is"
