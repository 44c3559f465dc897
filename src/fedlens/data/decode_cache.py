"""Remembers which image files can be decoded, and their hash, until a file changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import PIL

from fedlens import __version__
from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json
from fedlens.base.threads import map_threads
from fedlens.data.images import ImageFiles
from fedlens.files.caches import user_cache

Say = Callable[[str], None]


@dataclass(frozen=True)
class DecodeResult:
    """The result of decoding all files of a list.

    Args:
        faults: by position, the error of each file that cannot be decoded.
        contents: SHA-256 in hexadecimal of the bytes of all files, in order.
    """

    faults: Mapping[int, DataError]
    contents: str


def judge(images: ImageFiles, say: Say) -> DecodeResult:
    """Decodes every file once, and hashes it.

    The result is stored in the user's cache folder under the names, sizes and times of the files, so that a set of a
    million images is read in full only once and not before every run. If the folder is not writable, that costs time
    and nothing else.
    """
    path = user_cache("checked") / f"{_state(images)}.json"
    stored = _stored(images, path)
    if stored is not None:
        return stored
    say(
        f"checking {len(images):,} images, which do not all fit in data.cache; done once until a file changes"
    )
    result = _read(images)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        text = json.dumps({"contents": result.contents, "faulty": list(result.faults)})
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return result


def _stored(images: ImageFiles, path: Path) -> DecodeResult | None:
    """The result in a file, if it still holds.

    Faulty files are tried again: too many open files, a network drive that was not mounted, or a missing permission
    is not a fault of the file, and none of them shows in its name, size or time.
    """
    try:
        record = parse_json(path.read_bytes())
        contents, faulty = str(record["contents"]), [int(at) for at in record["faulty"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    faults: dict[int, DataError] = {}
    for at in faulty:
        if not 0 <= at < len(images):
            return None
        try:
            images.decode(at)
        except DataError as error:
            faults[at] = error
        else:
            return None
    return DecodeResult(faults, contents)


def _read(images: ImageFiles) -> DecodeResult:
    faults: dict[int, DataError] = {}

    def decode_and_hash(at: int) -> bytes:
        try:
            images.decode(at)
            return images.file_digest(at)
        except DataError as error:
            faults[at] = error
            return b""

    digests = map_threads(decode_and_hash, range(len(images)))
    return DecodeResult(dict(sorted(faults.items())), hashlib.sha256(b"".join(digests)).hexdigest())


def _state(images: ImageFiles) -> str:
    """SHA-256 in hexadecimal of all that a result depends on: the decoded form; names, sizes and times."""
    hashed = images.form_hash()
    hashed.update(f"{__version__} {PIL.__version__} {images.root.resolve()}\n".encode())
    for at in range(len(images)):
        try:
            stat = images.path(at).stat()
            hashed.update(f"{stat.st_size} {stat.st_mtime_ns}\n".encode())
        except OSError:
            hashed.update(b"gone\n")
    return hashed.hexdigest()
