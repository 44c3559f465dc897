"""Checks that the images that a list or its metadata names are on disk."""

from __future__ import annotations

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.folders import absent
from fedlens.data.images import ImageFiles


def check_present(dataset: Dataset) -> None:
    """Raises `DataError` if image files of a published dataset are not on disk: how many, and how to get them.

    A reader that has lists or metadata does not look for the images, so that partitions can be made without them.
    Call this before the images are read. It does nothing for a dataset that leaves out images that cannot be
    decoded, or that has no image files.
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
    facts = CATALOGUE.get(dataset.name)
    title = facts.title if facts else dataset.name
    raise DataError(
        f"{len(gone):,} of the {sum(map(len, parts)):,} images of {title} are missing, "
        f"the first is {first.files[at]}",
        where=str(first.root),
        hint=facts.how if facts else None,
    )
