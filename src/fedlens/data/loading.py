"""Decodes the image files of a dataset into memory, or as many as fit into a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.base.errors import DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.folders import check_images_present
from fedlens.data.decode_cache import Say, judge
from fedlens.data.diagnostics import Findings
from fedlens.data.images import ImageFiles, decode_all


def loaded(dataset: Dataset, nbytes: int, say: Say = lambda sentence: None) -> Dataset:
    """The dataset with all images decoded, if they fit in `nbytes`; else with a cache of that size.

    If images cannot be decoded, raises `DataError` with every such file, or leaves them out with their masks or
    boxes and notes it, as `dataset.on_error` says. A set that does not fit is decoded in full for this check, once
    until a file changes (`fedlens.data.decode_cache`); later its files are decoded on demand.
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
