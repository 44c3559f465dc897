"""From image files to what a run works with: all in memory where that fits, otherwise kept as far as it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.findings import Findings
from fedlens.data.images import ImageFiles, decode_all, decode_threads

Say = Callable[[str], None]


def loaded(dataset: Dataset, nbytes: int, say: Say = lambda sentence: None) -> Dataset:
    """The dataset with its images decoded once, where all of them fit in `nbytes`; else with a store of that size.

    An image that cannot be decoded ends it with a `DataError` that names every such file, or is left out and
    noted, with its mask or boxes, as `dataset.on_error` says. Of a set that does not fit, files are decoded when
    they are wanted; one that cannot be decoded then ends the run.
    """
    files = [
        part
        for split in (dataset.train, dataset.test)
        for part in (split.inputs, split.targets)
        if isinstance(part, ImageFiles)
    ]
    if not files:
        return dataset
    if sum(part.nbytes for part in files) > nbytes:
        return _stored(dataset, files, nbytes)
    say(f"decoding {sum(map(len, files)):,} images")
    findings = Findings()
    train, test = _decoded(dataset.train, findings), _decoded(dataset.test, findings)
    skipped = findings.settle(dataset.on_error)
    return replace(dataset, train=train, test=test, notes=(*dataset.notes, *skipped))


def _stored(dataset: Dataset, files: list[ImageFiles], nbytes: int) -> Dataset:
    """Every part gets its share of the memory."""
    total = sum(part.nbytes for part in files)

    def kept(part: Any) -> Any:
        return part.kept(int(nbytes * (part.nbytes / total))) if isinstance(part, ImageFiles) else part

    def split(examples: Examples) -> Examples:
        return Examples(kept(examples.inputs), kept(examples.targets), examples.columns)

    return replace(dataset, train=split(dataset.train), test=split(dataset.test))


def _decoded(split: Examples, findings: Findings) -> Examples:
    bad: set[int] = set()

    def whole(part: Any) -> Any:
        if not isinstance(part, ImageFiles):
            return part
        pixels, faults = decode_all(part, decode_threads())
        for _, fault in sorted(faults.items()):
            findings.add(fault.where, fault.what, fault.hint)
        bad.update(faults)
        return pixels

    examples = Examples(whole(split.inputs), whole(split.targets), split.columns)
    if not bad:
        return examples
    return examples.take(np.setdiff1d(np.arange(len(examples)), sorted(bad)))
