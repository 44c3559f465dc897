"""The image files that a user names: files, folders and patterns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.folder_listing import image_names


class NamedImage(NamedTuple):
    """One file: its path as the user named it, and what is wrong with it, if that is known without opening it."""

    path: Path
    fault: str | None = None


def named_images(paths: Sequence[str | os.PathLike[str]]) -> list[NamedImage]:
    """The image files that the paths name, each once, in the order of the paths.

    A folder stands for the images below it, sorted by name; hidden files and files without the ending of an image are
    left out. `**` in a pattern stands for any folders. A link that leads out of its folder, a pipe, a device, a folder
    that cannot be read, and a path or pattern without a file are listed with their fault.

    Raises `DataError` if the paths name no file that may be an image.

    >>> named_images(["no/such.png"])
    Traceback (most recent call last):
    fedlens.base.errors.DataError: no image to predict: the file does not exist (no/such.png); check its name, ...
    """
    images: dict[Path, NamedImage] = {}
    for given in paths:
        for image in _below(os.fspath(given)):
            images.setdefault(image.path, image)
    if all(image.fault for image in images.values()):
        raise _no_image(paths, list(images.values()))
    return list(images.values())


def _below(given: str) -> Iterator[NamedImage]:
    path = Path(given).expanduser()
    if path.is_dir():
        yield from _of_folder(path)
    elif os.path.lexists(path):
        yield NamedImage(path)
    elif has_magic(given):
        matches = sorted(glob(str(path), recursive=True))
        if not matches:
            yield NamedImage(path, "no file matches the pattern; quote it for the shell, or check the folder")
        for match in matches:
            if not os.path.isdir(match):
                yield NamedImage(Path(match))
            elif "**" not in given:  # `**` names the files in a folder by itself
                yield from _of_folder(Path(match))
    else:
        yield NamedImage(path, "the file does not exist; check its name, upper and lower case too")


def _of_folder(folder: Path) -> Iterator[NamedImage]:
    findings = Findings()
    names, _ = image_names(folder, folder, findings)
    yield from (NamedImage(folder / name) for name in names)
    for finding in findings:
        yield NamedImage(Path(finding.where), "; ".join(filter(None, [finding.what, finding.hint])))


def _no_image(paths: Sequence[str | os.PathLike[str]], faulty: Sequence[NamedImage]) -> DataError:
    if faulty:
        first = faulty[0]
        more = f", and {len(faulty) - 1:,} more such paths" if len(faulty) > 1 else ""
        what, _, hint = str(first.fault).partition("; ")
        return DataError(f"no image to predict: {what}", where=f"{first.path}{more}", hint=hint or None)
    named = ", ".join(os.fspath(path) for path in paths[:3]) or None
    hint = "name image files, or a folder with .jpg, .png, .bmp, .gif, .webp, .tif or .ppm files"
    return DataError("no image to predict", where=named, hint=hint)
