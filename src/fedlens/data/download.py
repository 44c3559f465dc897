"""Downloads published files: resumes broken transfers, verifies checksums, and never leaves half a file.

pooch does none of the first (version 1.9 starts each download again).
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedlens import __version__
from fedlens.base.errors import DataError

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all if known

ATTEMPTS = 4  # per address, as long as each attempt brings some bytes
TIMEOUT = 30.0  # seconds without data
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Resource:
    """A published file: its name on disk, its addresses, the most trusted first, and its published MD5."""

    name: str
    urls: tuple[str, ...]
    md5: str


class _Broken(Exception):
    """A transfer that did not finish; its bytes are kept, and the next attempt resumes there."""


class _Refused(Exception):
    """A server answered without the right file."""


def fetch(resource: Resource, folder: Path, progress: Progress | None = None) -> Path:
    """The path of `resource` in `folder`, downloaded if it does not exist yet.

    The bytes go to `<name>.part`; a later call resumes after an interruption. Only a file with the right checksum gets
    its real name, in one step.

    Raises `DataError` if no address gives the file (the bytes so far are kept), if their checksum is wrong (they are
    removed), or if the disk cannot be written.
    """
    path = folder / resource.name
    if path.is_file() and _md5(path) == resource.md5:
        return path
    report = progress or to_stderr
    reasons = []
    for url in resource.urls:
        try:
            _from(url, resource, folder, report)
            return path
        except (_Broken, _Refused) as error:
            reasons.append(f"{url}: {error}")
    kept = (folder / f"{resource.name}.part").is_file()
    raise DataError(
        f"'{resource.name}' could not be downloaded: {'; '.join(reasons)}",
        where=str(folder),
        hint="check the network, and run again" + (" to resume" if kept else ""),
    )


def extract(archive: Path, folder: Path, inner: str) -> Path:
    """Unpacks the directory `inner` of a tar archive to `folder / inner`, each file in one step.

    Then the archive is removed. Other files in the folder stay. Members or links that leave the folder, and devices,
    are refused (the tar filter "data"). Raises `DataError` if the archive is damaged, has such a member, or has no
    `inner`.
    """
    work = folder / f".{inner}.part"
    shutil.rmtree(work, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        if not (work / inner).is_dir():
            raise DataError(f"the archive has no directory '{inner}'", where=str(archive))
        for path in sorted(path for path in (work / inner).rglob("*") if path.is_file()):
            target = folder / path.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"the archive cannot be unpacked: {error}", where=str(archive)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    archive.unlink()
    return folder / inner


def to_stderr(name: str, done: int, total: int | None) -> None:
    """Prints progress: on a terminal one line that is overwritten, otherwise one at the start and the end."""
    finished = total is not None and done >= total
    terminal = sys.stderr.isatty()
    if not (terminal or finished or done == 0):
        return
    size = f" of {total / 1e6:.1f}" if total else ""
    line = f"downloading {name}: {done / 1e6:.1f}{size} MB"
    before, after = ("\r", "\n" if finished else "") if terminal else ("", "\n")
    sys.stderr.write(f"{before}{line}{after}")
    sys.stderr.flush()


def _from(url: str, resource: Resource, folder: Path, report: Progress) -> None:
    """Downloads the file from one address, again as long as attempts bring bytes."""
    part = folder / f"{resource.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder cannot be created: {error.strerror}", where=str(folder)) from error
    for attempt in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(url, part, resource.name, report)
        except _Broken:
            after = part.stat().st_size if part.exists() else 0
            if after <= before or attempt == ATTEMPTS - 1:
                raise
            continue
        digest = _md5(part)
        if digest == resource.md5:
            part.replace(folder / resource.name)
            return
        part.unlink()
        # The bytes of an earlier call may be of another version or mirror, so try once from the start.
        if not before or attempt == ATTEMPTS - 1:
            raise _Refused(f"MD5 {resource.md5} was expected, and the file had {digest}; it was removed")
    raise _Broken("the connection broke repeatedly")


def _transfer(url: str, part: Path, name: str, report: Progress) -> None:
    """Appends the missing bytes of `url` to `part`; raises `_Broken` if the transfer ends early."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": f"fedlens/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
            start = _start(answer, have)
            length = answer.headers.get("Content-Length")
            total = start + int(length) if length and length.isdecimal() else None
            done = _append(answer, part, start, lambda so_far: report(name, so_far, total))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
                return  # `part` is complete already; the checksum decides
            raise _Refused(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(getattr(error, "reason", error)) or type(error).__name__) from error
    if total is not None and done < total:
        raise _Broken(f"the connection broke after {done} of {total} bytes")


def _start(answer: http.client.HTTPResponse, have: int) -> int:
    """The position of the first byte of the response; a server without ranges starts at 0."""
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    if not match or int(match[1]) != have:
        raise _Refused(f"the request was for the bytes from {have} on, and the server sent others")
    return have


def _append(answer: http.client.HTTPResponse, part: Path, start: int, report: Callable[[int], None]) -> int:
    done = start
    report(done)
    with _disk(part):
        file = part.open("r+b" if start else "wb")
    with file:
        file.seek(start)
        while chunk := answer.read(_CHUNK):
            with _disk(part):
                file.write(chunk)
            done += len(chunk)
            report(done)
        with _disk(part):
            file.flush()
            os.fsync(file.fileno())
    return done


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns errors of the disk into `DataError`, so that they are not retried like errors of the network."""
    try:
        yield
    except OSError as error:
        raise DataError(f"the file cannot be written: {error.strerror}", where=str(path)) from error


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
