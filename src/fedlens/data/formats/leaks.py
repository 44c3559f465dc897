"""Finds images that are in more than one split, and images that occur with several labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedlens.base.threads import map_threads
from fedlens.data.diagnostics import Findings
from fedlens.data.images import file_sha256

_NAMED = 3  # pairs that the message names


def check_leaks(root: Path, names: Sequence[str], splits: Sequence[str], findings: Findings) -> None:
    """Adds one problem of the whole set if images are in more than one split: their number, and the first few.

    An image is in two splits if its file is, or if two files have the same content; see `same_content`.
    """
    groups = same_content(root, names, splits)
    if not groups:
        return
    pairs = []
    for group in groups[:_NAMED]:
        first, *others = sorted(group, key=lambda row: splits[row] != "train")
        second = next(row for row in others if splits[row] != splits[first])
        twin = f"the same as '{names[second]}' ({splits[second]})"
        also = f"in {splits[second]} too" if names[first] == names[second] else twin
        pairs.append(f"'{names[first]}' ({splits[first]}) is {also}")
    more = f", and {len(groups) - _NAMED:,} more" if len(groups) > _NAMED else ""
    count = f"{len(groups):,} images are" if len(groups) > 1 else "1 image is"
    what = f"{count} in more than one split, a leak: {', '.join(pairs)}{more}"
    findings.add_whole(root, what, "keep each in one split only")


def check_contradictions(
    root: Path,
    names: Sequence[str],
    labels: Sequence[str],
    clients: Sequence[str] | None,
    findings: Findings,
) -> None:
    """Adds a warning for each group of files with the same content and different labels: one label must be wrong.

    Args:
        root: the folder of the images.
        names: [n], the files below `root`.
        labels: [n], the class of each, or all of its classes, as text.
        clients: [n], the client of each; None if there are none.
        findings: gets the warnings.
    """
    for group in same_content(root, names, labels):
        first, *others = group
        second = next(row for row in others if labels[row] != labels[first])
        if clients is not None:  # of another client, if one of these has another label
            apart = (row for row in others if labels[row] != labels[first] and clients[row] != clients[first])
            second = next(apart, second)
        files = (
            f"'{names[row]}' ({'' if clients is None else f'{clients[row]}, '}{labels[row]})"
            for row in (first, second)
        )
        more = f"; {len(group):,} files have this content" if len(group) > 2 else ""
        what = f"the same image has different labels: {' and '.join(files)}{more}"
        findings.warn(root / names[second], what, "correct the label of one, or remove one of them")


def same_content(root: Path, names: Sequence[str], splits: Sequence[str]) -> list[list[int]]:
    """Groups of rows that have the same image and are not all in one split, in the order of their first rows.

    Files are compared by SHA-256 if their size occurs in several splits; of all other files only the size is
    read. Files that cannot be read are skipped.
    """
    unique = list(dict.fromkeys(names))
    sizes = {name: _size(root / name) for name in unique}
    splits_of_size: defaultdict[int | None, set[str]] = defaultdict(set)
    for name, split in zip(names, splits, strict=True):
        splits_of_size[sizes[name]].add(split)
    candidates = [name for name in unique if sizes[name] and len(splits_of_size[sizes[name]]) > 1]
    digests = dict(zip(candidates, _digests(root, candidates), strict=True))
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        if (digest := digests.get(name)) is not None:
            groups[digest].append(row)
    return [rows for rows in groups.values() if len({splits[row] for row in rows}) > 1]


def _digests(root: Path, names: Iterable[str]) -> list[bytes | None]:
    def digest(name: str) -> bytes | None:
        try:
            return file_sha256(root / name)
        except OSError:
            return None

    return map_threads(digest, names)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
