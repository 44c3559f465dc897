"""Lists the files below a folder, and the images that a command line names, without hidden files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.file_safety import LINK_HINT, is_below, refuse_link_out, special_file
from fedlens.data.formats.probe import FORMATS

_SYSTEM_FILES = {"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r"}


def image_names(folder: Path, root: Path, findings: Findings) -> tuple[list[str], list[str]]:
    """(images, others): the files below `folder`, with forward slashes, each list sorted.

    Images are recognized by their suffix. Hidden files and folders, and files that file managers create, are
    ignored. Links within the data folder `root` are followed. A link that leads out of it or to a folder above
    itself, a pipe, a socket, a device, and a folder that cannot be read are problems, and are left out.
    """
    images: list[str] = []
    others: list[str] = []
    before = len(findings)
    findings.attempt(refuse_link_out, folder, root, example=False)
    if len(findings) > before:
        return images, others
    real = os.path.realpath(folder)
    for name in _walk(folder, "", os.path.realpath(root), (real,), findings):
        (images if Path(name).suffix.lower() in FORMATS else others).append(name)
    return sorted(images), sorted(others)


def folders(folder: Path, root: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, without hidden ones and links that lead out of `root`."""
    within = os.path.realpath(root)
    try:
        entries = list(os.scandir(folder))
    except OSError:  # listing the images reports it
        return []
    return sorted(
        entry.name
        for entry in entries
        if not _hidden(entry.name)
        and _link_problem(entry, within, (os.path.realpath(folder),)) is None
        and entry.is_dir()
    )


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


def _walk(
    folder: Path, prefix: str, within: str, above: tuple[str, ...], findings: Findings
) -> Iterator[str]:
    """The files below `folder`; `above` are the real paths of `folder` and the folders that it is in."""
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        findings.add(folder, f"the folder cannot be read: {error.strerror}", "check its permissions")
        return
    for entry in entries:
        if _hidden(entry.name):
            continue
        problem = _link_problem(entry, within, above) or _kind_problem(entry)
        if problem is not None:
            findings.add(folder / entry.name, *problem)
        elif entry.is_dir():
            linked = entry.is_symlink()
            real = os.path.realpath(entry.path) if linked else os.path.join(above[-1], entry.name)
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", within, (*above, real), findings)
        else:
            yield prefix + entry.name


def _link_problem(entry: os.DirEntry[str], within: str, above: tuple[str, ...]) -> tuple[str, str] | None:
    """(problem, hint) of a link that is not followed; None for others. A link to nothing is a file to report later."""
    if not entry.is_symlink():
        return None
    try:
        target = os.path.realpath(entry.path, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "the link leads to itself", "remove the link"
        target = os.path.realpath(entry.path)
    if not is_below(target, within):
        return f"the link leads out of the data folder, to {target}", LINK_HINT
    if any(is_below(folder, target) for folder in above):
        return "the link leads to a folder that it is in, a loop", "remove the link"
    return None


def _kind_problem(entry: os.DirEntry[str]) -> tuple[str, str] | None:
    """(problem, hint) of a pipe, a socket or a device; None for files and folders."""
    if entry.is_file() or entry.is_dir():
        return None
    try:
        kind = special_file(entry.stat().st_mode)
    except OSError:  # a link to nothing, which the reader of the file reports
        return None
    return None if kind is None else (f"it is {kind}, not a file with data", "remove it")


def _hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX")) or name.lower() in _SYSTEM_FILES


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
