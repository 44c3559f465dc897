"""Checks that the images that a list or its metadata names are on disk."""

from __future__ import annotations

from fedlens.core.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.folders import absent
from fedlens.data.images import ImageFiles


def check_present(dataset: Dataset) -> None:
    """Raises `DataError` if image files of a published dataset are not on disk: how many, and how to get them.

    A reader that has lists or metadata does not look for the images, so that partitions can be made without them.
    Whoever wants the images asks here first. Of a dataset that leaves out what cannot be decoded, or of one that
    has no image files, nothing is asked.
    """
    if dataset.on_error is not None:
        return
    splits = [part for split in (dataset.train, dataset.test) for part in (split.inputs, split.targets)]
    parts = [part for part in splits if isinstance(part, ImageFiles)]
    gone = [
        (part, at)
        for part in parts
        for at in absent(part.root, list(map(part.files.__getitem__, range(len(part)))))
    ]
    if not gone:
        return
    first, at = gone[0]
    record = CATALOGUE.get(dataset.name)
    raise DataError(
        f"{len(gone):,} of the {sum(map(len, parts)):,} images of '{dataset.name}' are not there, "
        f"the first is {first.files[at]}",
        where=str(first.root),
        hint=record.how if record else None,
    )
