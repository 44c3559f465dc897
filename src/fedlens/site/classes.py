"""Brings the labels of a site to the classes of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.printable import printable
from fedlens.core.dataset_info import VOID
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.images import ImageFiles
from fedlens.site.settings import SiteSettings


def in_classes(dataset: Dataset, classes: Sequence[str], settings: SiteSettings) -> Examples:
    """The training examples with labels of these classes, as `[data] labels` says; equal names need no line.

    A label that is mapped to "" leaves its images out; in masks, its pixels have no class.

    Raises `ConfigError` for a local label that maps to nothing, and a line for no label or an unknown class.
    """
    number = _numbers(dataset.classes, classes, settings)
    train, targets = dataset.train, dataset.train.targets
    if dataset.kind == "segmentation":
        lookup = np.full(VOID + 1, VOID, np.uint8)
        lookup[: len(number)] = np.where(number < 0, VOID, number)
        return _same(train, _masks(targets, lookup))
    if isinstance(targets, Boxes):
        rows = np.repeat(np.arange(len(targets)), np.diff(targets.offsets))
        out = np.isin(np.arange(len(targets)), rows[number[targets.labels] < 0])
        relabelled: object = replace(targets, labels=np.maximum(number, 0)[targets.labels])
    elif dataset.kind == "multi-label":
        out = targets[:, number < 0].any(axis=1)
        sets = np.zeros((len(targets), len(classes)), np.uint8)
        for column, label in enumerate(number):
            if label >= 0:
                sets[:, label] |= targets[:, column]
        relabelled = sets
    else:
        out, relabelled = number[targets] < 0, np.maximum(number, 0)[targets]
    relabelled_examples = _same(train, relabelled)
    if not out.any():
        return relabelled_examples
    kept = np.flatnonzero(~out)
    names = None if train.names is None else train.names.take(kept)
    return replace(relabelled_examples.take(kept), names=names)


def _same(examples: Examples, targets: object) -> Examples:
    return replace(examples, targets=targets)


def _masks(masks: object, lookup: NDArray[np.uint8]) -> object:
    """The masks with other ids: of files as they are decoded."""
    if isinstance(masks, ImageFiles):
        return replace(masks, ids=lookup if masks.ids is None else lookup[masks.ids], store=None)
    assert isinstance(masks, np.ndarray)
    return lookup[masks]


def _numbers(local: Sequence[str], classes: Sequence[str], settings: SiteSettings) -> NDArray[np.int64]:
    """int64: the class of each local label, -1 for one that is left out."""
    where, given = f"{settings.path}: data.labels", settings.data.labels
    for label, name in given.items():
        if label not in local:
            what = f"the data have no label '{printable(label)}'"
            raise ConfigError(what, where=where, hint=nearest(label, local))
        if name and name not in classes:
            what = f"the experiment has no class '{printable(name)}'"
            raise ConfigError(what, where=where, hint=nearest(name, classes))
    numbers = []
    for label in local:
        name = given.get(label, label)
        if name and name not in classes:
            shown = printable(label)
            raise ConfigError(
                f"the local label '{shown}' is no class of the experiment",
                where=where,
                hint=f'write "{shown}" = "CLASS", or "{shown}" = "" to leave its images out; classes: '
                + printable(", ".join(classes))[:200],
            )
        numbers.append(classes.index(name) if name else -1)
    return np.array(numbers, np.int64)
