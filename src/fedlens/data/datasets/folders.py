"""Lists image files and folders, and reports the images of a list or dataset that are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fedlens.base.errors import DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.dataset import Dataset
from fedlens.data.images import ImageFiles

SUFFIXES = (".jpeg", ".jpg", ".png")


def check_images_present(dataset: Dataset) -> None:
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


def images_in(folder: Path) -> list[str]:
    """The names of the image files in a folder, sorted, without hidden files."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def absent(root: Path, names: Sequence[str]) -> list[int]:
    """The positions of the names (with "/") that have no file below `root`.

    Each folder is listed once, because asking for 1,800,000 files one by one takes minutes.
    """
    positions_in: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(names):
        positions_in[str(PurePosixPath(name).parent)].append(at)
    missing: list[int] = []
    for folder, positions in positions_in.items():
        place = root / folder
        files = {path.name for path in place.iterdir()} if place.is_dir() else set()
        missing += [at for at in positions if PurePosixPath(names[at]).name not in files]
    return sorted(missing)


def check_present(root: Path, names: Sequence[str], where: str) -> None:
    """Raises `DataError` if names in the list `where` have no file below `root`: how many, and the first."""
    missing = absent(root, names)
    if missing:
        raise DataError(
            f"{len(missing)} of the {len(names)} images in the list are not below {root}, "
            f"the first is {names[missing[0]]} of line {missing[0] + 1}",
            where=where,
            hint="unpack the archive of the images again",
        )
