"""Lists image files and folders, and reports the listed files that are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fedlens.base.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png")


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
