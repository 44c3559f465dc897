"""Lists the files below a folder: images and others, without hidden files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.probe import FORMATS

_SYSTEM_FILES = {"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r"}


def image_names(folder: Path) -> tuple[list[str], list[str]]:
    """(images, others): the files below `folder`, with forward slashes, each list sorted.

    Images are recognized by their suffix. Hidden files and folders, and files that file managers create, are
    ignored. Links to folders are followed, each once.
    """
    images: list[str] = []
    others: list[str] = []
    for name in _walk(folder, "", {folder.resolve()}):
        (images if Path(name).suffix.lower() in FORMATS else others).append(name)
    return sorted(images), sorted(others)


def folders(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not _hidden(entry.name))


def add_misnamed(folder: Path, names: Iterable[str], findings: Findings) -> None:
    """Adds files among the images that are not named as images are, as problems."""
    for name in names:
        hint = "move it elsewhere, or rename it with the ending of its format if it is an image"
        findings.add(folder / name, "the file name has no ending of an image", hint)


def stem(name: str) -> str:
    """A path without its ending.

    >>> stem("a.b/x.tar.gz")
    'a.b/x.tar'
    """
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}{file.rpartition('.')[0]}"


def _walk(folder: Path, prefix: str, seen: set[Path]) -> Iterator[str]:
    for entry in os.scandir(folder):
        if _hidden(entry.name):
            continue
        if not entry.is_dir():
            yield prefix + entry.name
            continue
        if entry.is_symlink():
            target = Path(entry.path).resolve()
            if target in seen:
                continue
            seen = seen | {target}
        yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", seen)


def _hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX")) or name.lower() in _SYSTEM_FILES
