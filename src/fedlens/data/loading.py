"""Decodes the image files of a dataset into memory, or as many as fit into a cache.

Which files can be decoded, and their hash, is remembered until a file changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from fedlens import __version__
from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json
from fedlens.base.threads import map_threads
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.folders import check_images_present
from fedlens.data.diagnostics import Findings
from fedlens.data.images import ImageFiles, decode_all
from fedlens.files.caches import user_cache


def loaded(dataset: Dataset, nbytes: int, say: Say = lambda sentence: None) -> Dataset:
    """The dataset with all images decoded, if they fit in `nbytes`; else with a cache of that size.

    If images cannot be decoded, raises `DataError` with every such file, or leaves them out with their masks or
    boxes and notes it, as `dataset.on_error` says. A set that does not fit is decoded in full for this check, once
    until a file changes (`fedlens.data.loading`); later its files are decoded on demand.
    """
    if dataset.parties:
        each = nbytes // len(dataset.parties)
        parties = tuple(party and loaded(party, each, say) for party in dataset.parties)
        return replace(loaded(replace(dataset, parties=()), each, say), parties=parties)
    files = [part for split in (dataset.train, dataset.test) for part in _files(split)]
    if not files:
        return dataset
    check_images_present(dataset)
    findings = Findings()
    fits = sum(part.nbytes for part in files) <= nbytes
    if fits:
        say(f"decoding {sum(map(len, files)):,} images")
    splits = [
        _decoded(split, findings) if fits else _judged(split, findings, say)
        for split in (dataset.train, dataset.test)
    ]
    skipped = findings.settle(dataset.on_error)
    if not fits:
        splits = _with_caches(splits, nbytes)
    before, left = (sum(map(len, parts)) for parts in ((dataset.train, dataset.test), splits))
    count = [f"left out {before - left:,} of {before:,} images, which cannot be decoded"] if skipped else []
    notes = (*count, *dataset.notes, *skipped)
    return replace(dataset, train=splits[0], test=splits[1], notes=notes, read_as=dataset.form)


def _with_caches(splits: Sequence[Examples], nbytes: int) -> list[Examples]:
    """The splits with a cache for each part, of its share of `nbytes`."""
    total = sum(part.nbytes for split in splits for part in _files(split))

    def cached(part: Any) -> Any:
        return part.kept(int(nbytes * (part.nbytes / total))) if isinstance(part, ImageFiles) else part

    return [Examples(cached(split.inputs), cached(split.targets), split.columns) for split in splits]


def _files(split: Examples) -> list[ImageFiles]:
    return [part for part in (split.inputs, split.targets) if isinstance(part, ImageFiles)]


def _judged(split: Examples, findings: Findings, say: Say) -> Examples:
    """The split without examples that cannot be decoded; its files know the hash of their contents."""
    bad: set[int] = set()
    contents: list[str | None] = [None, None]
    for at, part in enumerate((split.inputs, split.targets)):
        if isinstance(part, ImageFiles):
            result = judge(part, say)
            contents[at] = result.contents
            _add_faults(result.faults, findings, bad)
    good = _without(split, bad)
    inputs, targets = (
        replace(part, contents=digest) if isinstance(part, ImageFiles) else part
        for part, digest in zip((good.inputs, good.targets), contents, strict=True)
    )
    return Examples(inputs, targets, good.columns)


def _decoded(split: Examples, findings: Findings) -> Examples:
    """The split with its images decoded, without examples that cannot be decoded."""
    bad: set[int] = set()
    parts = [split.inputs, split.targets]
    for at, part in enumerate(parts):
        if isinstance(part, ImageFiles):
            parts[at], faults = decode_all(part)
            _add_faults(faults, findings, bad)
    good = _without(Examples(parts[0], parts[1], split.columns), bad)
    files = _without(split, bad).inputs
    return replace(good, names=files.files) if isinstance(files, ImageFiles) else good


def _add_faults(faults: Mapping[int, DataError], findings: Findings, bad: set[int]) -> None:
    for at in sorted(faults):
        findings.add(faults[at].where, faults[at].what, faults[at].hint)
    bad.update(faults)


def _without(split: Examples, bad: set[int]) -> Examples:
    return split.take(np.setdiff1d(np.arange(len(split)), sorted(bad))) if bad else split


Say = Callable[[str], None]


@dataclass(frozen=True)
class DecodeResult:
    """The result of decoding all files of a list.

    Args:
        faults: by position, the error of each file that cannot be decoded.
        contents: SHA-256 in hexadecimal of the bytes of all files, in order.
    """

    faults: Mapping[int, DataError]
    contents: str


def judge(images: ImageFiles, say: Say) -> DecodeResult:
    """Decodes every file once, and hashes it.

    The result is stored in the user's cache folder under the names, sizes and times of the files, so that a set of a
    million images is read in full only once and not before every run. If the folder is not writable, that costs time
    and nothing else.
    """
    path = user_cache("checked") / f"{_state(images)}.json"
    stored = _stored(images, path)
    if stored is not None:
        return stored
    say(
        f"checking {len(images):,} images, which do not all fit in data.cache; done once until a file changes"
    )
    result = _read(images)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        text = json.dumps({"contents": result.contents, "faulty": list(result.faults)})
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return result


def _stored(images: ImageFiles, path: Path) -> DecodeResult | None:
    """The result in a file, if it still holds.

    Faulty files are tried again: too many open files, a network drive that was not mounted, or a missing permission
    is not a fault of the file, and none of them shows in its name, size or time.
    """
    try:
        record = parse_json(path.read_bytes())
        contents, faulty = str(record["contents"]), [int(at) for at in record["faulty"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    faults: dict[int, DataError] = {}
    for at in faulty:
        if not 0 <= at < len(images):
            return None
        try:
            images.decode(at)
        except DataError as error:
            faults[at] = error
        else:
            return None
    return DecodeResult(faults, contents)


def _read(images: ImageFiles) -> DecodeResult:
    faults: dict[int, DataError] = {}

    def decode_and_hash(at: int) -> bytes:
        try:
            images.decode(at)
            return images.file_digest(at)
        except DataError as error:
            faults[at] = error
            return b""

    digests = map_threads(decode_and_hash, range(len(images)))
    return DecodeResult(dict(sorted(faults.items())), hashlib.sha256(b"".join(digests)).hexdigest())


def _state(images: ImageFiles) -> str:
    """SHA-256 in hexadecimal of all that a result depends on: the decoded form; names, sizes and times."""
    hashed = images.form_hash()
    hashed.update(f"{__version__} {PIL.__version__} {images.root.resolve()}\n".encode())
    for at in range(len(images)):
        try:
            stat = images.path(at).stat()
            hashed.update(f"{stat.st_size} {stat.st_mtime_ns}\n".encode())
        except OSError:
            hashed.update(b"gone\n")
    return hashed.hexdigest()
