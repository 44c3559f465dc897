"""From image files to what a run works with: all in memory where that fits, otherwise kept as far as it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.listed_images import check_present
from fedlens.data.decode_cache import Say, judge
from fedlens.data.diagnostics import Findings
from fedlens.data.images import ImageFiles, decode_all, decode_threads


def loaded(dataset: Dataset, nbytes: int, say: Say = lambda sentence: None) -> Dataset:
    """The dataset with its images decoded once, where all of them fit in `nbytes`; else with a store of that size.

    An image that cannot be decoded ends it with a `DataError` that names every such file, or is left out and
    noted, with its mask or boxes, as `dataset.on_error` says. A set that does not fit is decoded in full for that,
    once until a file changes (`fedlens.data.decode_cache`); then its files are decoded when they are wanted.
    """
    files = [part for split in (dataset.train, dataset.test) for part in _files(split)]
    if not files:
        return dataset
    check_present(dataset)
    findings = Findings()
    if sum(part.nbytes for part in files) > nbytes:
        splits = [_judged(split, findings, say) for split in (dataset.train, dataset.test)]
        skipped = findings.settle(dataset.on_error)
        splits = _stored(splits, nbytes)
    else:
        say(f"decoding {sum(map(len, files)):,} images")
        splits = [_decoded(split, findings) for split in (dataset.train, dataset.test)]
        skipped = findings.settle(dataset.on_error)
    return replace(dataset, train=splits[0], test=splits[1], notes=(*dataset.notes, *skipped))


def _stored(splits: Sequence[Examples], nbytes: int) -> list[Examples]:
    """Every part gets its share of the memory."""
    total = sum(part.nbytes for split in splits for part in _files(split))

    def kept(part: Any) -> Any:
        return part.kept(int(nbytes * (part.nbytes / total))) if isinstance(part, ImageFiles) else part

    return [Examples(kept(split.inputs), kept(split.targets), split.columns) for split in splits]


def _files(split: Examples) -> list[ImageFiles]:
    return [part for part in (split.inputs, split.targets) if isinstance(part, ImageFiles)]


def _judged(split: Examples, findings: Findings, say: Say) -> Examples:
    """The split without what cannot be decoded; its files know what is in them."""
    bad: set[int] = set()

    def known(part: Any) -> Any:
        if not isinstance(part, ImageFiles):
            return part
        verdict = judge(part, say)
        for fault in verdict.faults.values():
            findings.add(fault.where, fault.what, fault.hint)
        bad.update(verdict.faults)
        return verdict.contents

    contents = [known(split.inputs), known(split.targets)]
    rest = split.take(np.setdiff1d(np.arange(len(split)), sorted(bad))) if bad else split
    inputs, targets = (
        replace(part, contents=found) if isinstance(part, ImageFiles) else part
        for part, found in zip((rest.inputs, rest.targets), contents, strict=True)
    )
    return Examples(inputs, targets, rest.columns)


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
    rows = np.setdiff1d(np.arange(len(examples)), sorted(bad))
    rest = examples.take(rows) if bad else examples
    if not isinstance(split.inputs, ImageFiles):
        return rest
    return replace(rest, origin=split.inputs.files.take(rows).digest)
