"""Which image files can be decoded, and what is in them: found out once, and remembered until a file changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import PIL

from fedlens import __version__
from fedlens.core.errors import DataError
from fedlens.data.images import ImageFiles, decode_threads

Say = Callable[[str], None]


@dataclass(frozen=True)
class DecodeResult:
    """What was found in the files of a list.

    Args:
        faults: by position, the error of each file that cannot be decoded.
        contents: SHA-256 in hexadecimal of the bytes of all files, in order.
    """

    faults: Mapping[int, DataError]
    contents: str


def judge(images: ImageFiles, say: Say) -> DecodeResult:
    """Decodes every file once, and hashes it.

    The verdict is kept in the user's cache folder under the names, sizes and times of the files, so that a set of
    a million images is read in full once and not before every run. A folder that cannot be written to costs
    time only.
    """
    path = _folder() / f"{_state(images)}.json"
    known = _remembered(images, path)
    if known is not None:
        return known
    say(
        f"checking {len(images):,} images, which do not all fit in data.cache; done once until a file changes"
    )
    verdict = _read(images)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        text = json.dumps({"contents": verdict.contents, "faulty": list(verdict.faults)})
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return verdict


def _remembered(images: ImageFiles, path: Path) -> DecodeResult | None:
    """The verdict in a file, if it still holds.

    What was at fault is tried again: too many open files, a network drive that was away, or a missing right is no
    fault of the file, and none of them shows in its name, size or time.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        contents, faulty = str(kept["contents"]), [int(at) for at in kept["faulty"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    faults: dict[int, DataError] = {}
    for at in faulty:
        try:
            if not 0 <= at < len(images):
                return None
            images.decode(at)
            return None
        except DataError as error:
            faults[at] = error
    return DecodeResult(faults, contents)


def fingerprint(images: ImageFiles) -> str:
    """SHA-256 in hexadecimal of the names and the bytes of the files, and of the form they are brought to.

    The bytes are read, unless that was done before (`ImageFiles.contents`). Raises `DataError` where a file cannot
    be read.
    """
    hashed = _form(images)
    hashed.update((images.contents or _contents(images)).encode())
    return hashed.hexdigest()


def _contents(images: ImageFiles) -> str:
    def one(at: int) -> bytes:
        try:
            return _digest(images.path(at))
        except OSError as error:
            raise DataError(
                f"the file cannot be read: {error.strerror}", where=str(images.path(at))
            ) from error

    with ThreadPoolExecutor(decode_threads()) as pool:
        return hashlib.sha256(b"".join(pool.map(one, range(len(images))))).hexdigest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _read(images: ImageFiles) -> DecodeResult:
    faults: dict[int, DataError] = {}

    def one(at: int) -> bytes:
        try:
            images.decode(at)
            return _digest(images.path(at))
        except DataError as error:
            faults[at] = error
        except OSError as error:  # it was there a moment ago
            faults[at] = DataError(f"the file cannot be read: {error.strerror}", where=str(images.path(at)))
        return b""

    with ThreadPoolExecutor(decode_threads()) as pool:
        digest = hashlib.sha256(b"".join(pool.map(one, range(len(images))))).hexdigest()
    return DecodeResult(dict(sorted(faults.items())), digest)


def _state(images: ImageFiles) -> str:
    """SHA-256 in hexadecimal of all on which a verdict depends: the form wanted; names, sizes and times."""
    hashed = _form(images)
    hashed.update(f"{__version__} {PIL.__version__} {images.root.resolve()}\n".encode())
    for at in range(len(images)):
        try:
            found = images.path(at).stat()
            hashed.update(f"{found.st_size} {found.st_mtime_ns}\n".encode())
        except OSError:
            hashed.update(b"gone\n")
    return hashed.hexdigest()


def _form(images: ImageFiles) -> hashlib._Hash:
    """A hash that was fed with the names of the files and the form they are brought to."""
    hashed = hashlib.sha256(repr((images.shape, images.fit, images.upright, images.opener)).encode())
    hashed.update(b"" if images.ids is None else images.ids.tobytes())
    hashed.update(images.files.offsets.astype("<i8").tobytes())
    hashed.update(images.files.text.tobytes())
    return hashed


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedlens" / "checked"
