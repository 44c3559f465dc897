"""Finds or downloads the files of published datasets, and reports what is wrong with them."""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json
from fedlens.data.catalogue import CATALOGUE, Archive, Patterns, search
from fedlens.data.dataset import Dataset, Examples, channel_moments
from fedlens.data.download import Resource, extract, fetch
from fedlens.data.images import ImageFiles

DAMAGED = "the file is corrupt or not the published one: remove it and download it again"
# Of ImageNet's training images, as is usual for photographs.
PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def locate(
    name: str,
    root: Path,
    download: bool = False,
    files: Sequence[Patterns] | None = None,
    folder: str | None = None,
) -> tuple[Path, ...]:
    """The first path below `root` for each pattern of a dataset's files.

    Args:
        name: of the dataset in the catalogue.
        download: whether to fetch the archives that provide missing files.
        files: one or more sets of patterns, as in `DatasetFacts.files`, which is the default. The set with the
            largest share of matches is used.
        folder: where archives are saved and unpacked, instead of their own folders.

    Raises `DataError` if files are missing: which ones, where, and how to get them.
    """
    facts = CATALOGUE[name]
    files = facts.files if files is None else files
    result = search(files, root)
    missing = {pattern for patterns in files for pattern in search([patterns], root).lacking}
    archives = [a for a in facts.archives if any(fnmatchcase(pattern, a.gives) for pattern in missing)]
    if result.lacking and download:
        for archive in archives:
            provide(archive, root / (folder or archive.folder))
        result = search(files, root)
    if not result.lacking:
        return result.found
    if result.state == "partly":
        what = f"{facts.title} is incomplete in {root}: missing {_listed(result.lacking)}"
    else:
        what = f"{facts.title} not found in {root}: looked for {', or '.join(map(_listed, files))}"
    if not archives:
        how = f"--download does not fetch it: {facts.how}"
    elif download:
        how = "the downloaded archives do not have them: put the files there"
    else:
        how = "run again with --download to fetch them, or put the files there"
    hint = f"{how}; --data-dir or the environment variable FEDLENS_DATA names another folder to look in"
    raise DataError(what, hint=hint)


def _listed(patterns: Patterns) -> str:
    return ", ".join(pattern.replace("|", " or ") for pattern in patterns)


def provide(archive: Archive, folder: Path) -> None:
    """Fetches an archive into `folder` and unpacks what is needed of it. Raises `DataError`."""
    path = fetch(Resource(archive.urls[0].rpartition("/")[2], archive.urls, archive.md5), folder)
    if path.suffix == ".zip":
        unzip(path, folder, lambda member: any(fnmatchcase(member, one) for one in archive.take.split("|")))
    elif archive.take:
        extract(path, folder, archive.take)


def split_counts(name: str) -> tuple[int, int]:
    """The published numbers of training and test examples of a dataset of the catalogue."""
    facts = CATALOGUE[name]
    assert facts.train is not None
    assert facts.test is not None
    return facts.train, facts.test


def published(
    name: str,
    splits: Iterable[Examples],
    classes: tuple[str, ...] = (),
    *,
    notes: Sequence[str] = (),
    coarse: NDArray[np.int64] | None = None,
    seeded: bool = False,
    source: str | None = None,
    vocabulary: int | None = None,
    moments: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Dataset:
    """A dataset of the catalogue from its training and test `splits`, with the facts of the catalogue.

    These are the licence, and the source and the class names unless they are given.
    Mean and standard deviation are those of the catalogue if it states them. Otherwise they are ImageNet's usual
    ones for images in files, those of the training images for images in memory, and empty for text. `moments` are
    others, as (mean, std). `vocabulary` is that of texts.
    """
    facts = CATALOGUE[name]
    train, test = splits
    mean, std = moments or (facts.mean, facts.std)
    moments_of = 0
    if not mean and train.kind != "language":
        if isinstance(train.inputs, ImageFiles):
            mean, std = PHOTO_MEAN, PHOTO_STD
        else:
            mean, std = channel_moments(train.inputs)
            std = tuple(one or 1.0 for one in std)  # images of one colour must not be divided by 0
            moments_of = len(train)
    return Dataset(
        name,
        train,
        test,
        classes or facts.labels,
        mean,
        std,
        licence=facts.licence or "not stated",
        source=source or facts.source or "not stated",
        coarse=coarse,
        notes=tuple(notes),
        seeded=seeded,
        vocabulary=vocabulary,
        moments_of=moments_of,
    )


def damaged(what: str, path: Path, line: int | None = None, hint: str | None = None) -> DataError:
    """The error for a file or folder that is not as published. By default the hint says how to get it again.

    >>> print(damaged("the list is empty", Path("a.txt"), 3, hint="get it again"))
    the list is empty (a.txt, line 3); get it again.
    """
    where = str(path) if line is None else f"{path}, line {line}"
    return DataError(what, where=where, hint=hint or get_again(path))


def get_again(path: Path) -> str:
    """The hint for a file or folder that is not the published one; names --download if that fetches it.

    >>> get_again(Path("data/MNIST/raw/train-images-idx3-ubyte"))
    'the file is corrupt or not the published one: remove it and download it again, for example with --download'
    """
    fetched = {
        pattern.partition("/")[0]
        for facts in CATALOGUE.values()
        for archive in facts.archives
        for pattern in (*chain.from_iterable(facts.files), archive.gives)
        if fnmatchcase(pattern, archive.gives)
    }
    hint = DAMAGED.replace("file is corrupt or", "folder is") if path.is_dir() else DAMAGED
    return hint if fetched.isdisjoint(path.parts) else f"{hint}, for example with --download"


@contextmanager
def reading(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turns errors while the file `path` is read and parsed into a `DataError` that names it."""
    try:
        yield
    except json.JSONDecodeError as error:
        what = f"the file cannot be read: it is not valid JSON: {error.msg}"
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise DataError(what, where=where, hint=hint or get_again(path)) from error
    except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
        reason: object = error
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is not in UTF-8: byte {error.start} cannot be decoded"
        elif isinstance(error, OSError):
            reason = error.strerror or error
        raise damaged(f"the file cannot be read: {reason}", path, hint=hint) from error


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, without empty ones at its end.

    Raises `DataError` if it is not text.
    """
    with reading(path):
        return path.read_text("utf-8-sig").rstrip().splitlines()


def read_json(
    path: Path, hook: Callable[[list[tuple[str, Any]]], Any] | None = None, hint: str | None = None
) -> Any:
    """The content of a JSON file; `hook` builds each object from its pairs. Raises `DataError`."""
    with reading(path, hint):
        return parse_json(path.read_text("utf-8-sig"), hook)


def unzip(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> int:
    """Unpacks the members of `archive` that are `wanted`, by name, below `folder`; how many they are.

    Every member is checked against its CRC-32 before it gets its name. Raises `DataError` if the archive
    is damaged, a name points outside the folder, or no member is wanted; otherwise the archive is removed at the end.
    """
    count = 0
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                if member.is_dir() or not wanted(member.filename):
                    continue
                parts = PurePosixPath(member.filename).parts
                if ".." in parts or member.filename.startswith("/"):
                    raise DataError(f"'{member.filename}' points outside the folder", where=str(archive))
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(target.name + ".part")
                try:
                    with packed.open(member) as source, part.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
                count += 1
    # zipfile raises these two for an unknown compression method and for an encrypted member.
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise DataError(f"the archive cannot be unpacked: {error}", where=str(archive)) from error
    if not count:
        raise DataError("the archive contains none of the expected files", where=str(archive))
    archive.unlink()
    return count
