"""What readers of image folders share: which files are there, which are not, and how to get them by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fedlens.core.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png")
# Of ImageNet's training images, as everybody takes them for photographs.
PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def by_hand(name: str, folder: Path, wanted: str, how: str) -> DataError:
    """The error for a dataset that is not on disk and that --download does not fetch: `how` to get it."""
    return DataError(
        f"'{name}' not found, and --download does not fetch it: looked for {wanted}",
        where=str(folder),
        hint=f"{how}; --data-dir or the environment variable FEDLENS_DATA names another folder to look in",
    )


def images_in(folder: Path) -> list[str]:
    """The names of the image files in a folder, sorted; hidden files do not count."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; hidden ones do not count."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def absent(root: Path, names: Sequence[str]) -> list[int]:
    """The positions of the names (with "/") that have no file below `root`.

    Each folder is listed once, because asking for 1,800,000 files one by one takes minutes.
    """
    wanted: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(names):
        wanted[str(PurePosixPath(name).parent)].append(at)
    gone: list[int] = []
    for folder, positions in wanted.items():
        place = root / folder
        there = {path.name for path in place.iterdir()} if place.is_dir() else set()
        gone += [at for at in positions if PurePosixPath(names[at]).name not in there]
    return sorted(gone)


def check_present(root: Path, names: Sequence[str], where: str) -> None:
    """Raises `DataError` where names in the list `where` have no file below `root`: how many, and the first."""
    gone = absent(root, names)
    if gone:
        raise DataError(
            f"{len(gone)} of the {len(names)} images in the list are not below {root}, "
            f"the first is {names[gone[0]]} of line {gone[0] + 1}",
            where=where,
            hint="unpack the archive of the images again",
        )


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, without empty ones at its end.

    Raises `DataError` where it is not text.
    """
    try:
        return path.read_text("utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path)) from error
