"""Decides whether a run keeps test images in its directory and on its page."""

from __future__ import annotations

from fedlens.data.catalogue import CATALOGUE

AUTO = "auto"


def is_published(dataset: object) -> bool:
    """Whether this name, or function, of a dataset is one of the catalogue and not a user's own data.

    >>> is_published("cifar10"), is_published("image-folder"), is_published("mine.py:scans"), is_published(len)
    (True, False, False, False)
    """
    facts = CATALOGUE.get(dataset) if isinstance(dataset, str) else None
    return facts is not None and not facts.own


def keeps_images(setting: object, dataset: object) -> bool:
    """Whether a run keeps images of the test data: as `record.images` says, with "auto" of published data alone.

    Args:
        setting: `record.images`: true, false or "auto".
        dataset: `data.dataset.name`: a name, or a function of the user.

    >>> keeps_images("auto", "digits"), keeps_images("auto", "coco-json"), keeps_images(True, "coco-json")
    (True, False, True)
    """
    return is_published(dataset) if setting == AUTO else setting is True
