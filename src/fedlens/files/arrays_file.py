"""Files of named arrays and a table of facts, which NumPy alone can read (`.npz`)."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import RunDirectoryError
from fedlens.base.parse_text import parse_json
from fedlens.files.atomic_files import read_regular, refused, write_atomically

Arrays = Mapping[str, NDArray[Any]]

_LARGEST = 2**27  # bytes of all arrays of a file
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, EOFError)
Read = TypeVar("Read")


class ArrayContents(Protocol):
    """The contents of a file of arrays."""

    def write(self, path: Path) -> None:
        """Writes the file."""


Contents = TypeVar("Contents", bound=ArrayContents)


def write_arrays(path: Path, format: str, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Writes a file atomically. Raises `RunFailed` if the disk refuses.

    Its name survives a power cut after the next file of the folder that is written durably, such as summary.json.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "counts.npz"
    >>> write_arrays(path, "counts-1", {"round": 3}, {"counts": np.array([1, 2])})
    >>> read_arrays(path, "counts-1", lambda about, arrays: (about["round"], arrays["counts"].tolist()))
    (3, [1, 2])
    """
    text = json.dumps({"format": format, **about})
    file = io.BytesIO()
    given: dict[str, Any] = {"about": np.frombuffer(text.encode(), np.uint8), **arrays}
    np.savez_compressed(file, **given)
    write_atomically(path, file.getvalue(), named=False)


def read_arrays(
    path: Path, format: str, made: Callable[[Mapping[str, Any], dict[str, NDArray[Any]]], Read]
) -> Read:
    """What `made` returns for the facts and the arrays of a file.

    Raises `RunDirectoryError` if the file is missing, is corrupt, has another format, or `made` raises `ValueError`,
    `KeyError` or `TypeError`.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror or error}"
        raise RunDirectoryError(what, where=str(path)) from error
    try:
        return made(*_unpacked(content, format))
    except _UNREADABLE as error:
        raise RunDirectoryError(f"{path.name} is corrupt: {error}", where=str(path)) from error


def parts_of(name: str, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """The arrays whose names begin with `name.`, without this beginning.

    >>> parts_of("sums", {"sums.loss": np.array(1.0), "index": np.array(2)})
    {'loss': array(1.)}
    """
    start = f"{name}."
    return {key.removeprefix(start): array for key, array in arrays.items() if key.startswith(start)}


def named(name: str, parts: Arrays) -> dict[str, NDArray[Any]]:
    """The arrays with `name.` before their names: what `parts_of` takes apart."""
    return {f"{name}.{key}": array for key, array in parts.items()}


def rewrite_without_images(
    path: Path, read: Callable[[Path], Contents], without: Callable[[Contents], Contents | None]
) -> None:
    """Rewrites the file at `path` without its images; a corrupt file, which may contain images, is removed.

    Args:
        read: reads the file, and raises `RunDirectoryError` if it is corrupt.
        without: the contents without images; None if they have none.

    Raises `RunFailed` if the disk refuses.
    """
    if not path.exists():
        return
    try:
        bare = without(read(path))
    except RunDirectoryError:
        try:
            path.unlink()
        except OSError as error:
            raise refused(error, f"{path.name} without its images", path) from error
        return
    if bare is not None:
        bare.write(path)


def _unpacked(content: bytes, format: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    file = io.BytesIO(content)
    with zipfile.ZipFile(file) as packed:
        if sum(member.file_size for member in packed.infolist()) > _LARGEST:
            raise ValueError("its arrays are too large")
    file.seek(0)
    with np.load(file, allow_pickle=False) as opened:
        arrays = {name: opened[name] for name in opened.files}
    about = parse_json(arrays.pop("about").tobytes())
    if about["format"] != format:
        raise ValueError(f"its format is {about['format']!r}, not {format!r}")
    return about, arrays
