"""Fetching published files: resumed where they broke off, checked before they count, never half there."""

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
from fedlens.core.errors import DataError

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where known

ATTEMPTS = 4  # a broken connection is taken up again this many times while it brings something
TIMEOUT = 30.0  # seconds of silence
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Resource:
    """A published file: its name on disk, where it is, most trusted place first, and its MD5 as published."""

    name: str
    urls: tuple[str, ...]
    md5: str


class _Broken(Exception):
    """A transfer that did not finish; what came of it is kept, and the next attempt goes on from there."""


class _Refused(Exception):
    """A server that answered, and will not give the file."""


def fetch(resource: Resource, folder: Path, progress: Progress | None = None) -> Path:
    """The path of `resource` in `folder`, fetched where it is not there yet.

    The bytes go to `<name>.part`; a later call goes on where an earlier one broke off. Only a file with the
    right checksum gets its real name, in one step.

    Raises `DataError` where no place gives the file (what came so far is kept), where what they give has
    another checksum (it is removed), and where the disk does not take it.
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
        f"'{resource.name}' could not be fetched: {'; '.join(reasons)}",
        where=str(folder),
        hint="see to the network, and run again" + (" to go on from where it broke off" if kept else ""),
    )


def extract(archive: Path, folder: Path, inner: str) -> Path:
    """Unpacks the directory `inner` of a tar archive to `folder / inner`, each file whole or not at all.

    Then the archive is removed. Whatever else is in the folder stays. Members that would leave the folder, links
    out of it, and devices are refused (the tar filter "data"). Raises `DataError` where the archive is damaged,
    holds such a member, or has no `inner`.
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
    """Progress for a person: on a terminal a line that is written over, otherwise one at each end."""
    finished = total is not None and done >= total
    terminal = sys.stderr.isatty()
    if not (terminal or finished or done == 0):
        return
    size = f" of {total / 1e6:.1f}" if total else ""
    line = f"fetching {name}: {done / 1e6:.1f}{size} MB"
    before, after = ("\r", "\n" if finished else "") if terminal else ("", "\n")
    sys.stderr.write(f"{before}{line}{after}")
    sys.stderr.flush()


def _from(url: str, resource: Resource, folder: Path, report: Progress) -> None:
    """Brings the file from one place, with as many attempts as make headway."""
    part = folder / f"{resource.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder cannot be made: {error.strerror}", where=str(folder)) from error
    for attempt in range(ATTEMPTS):
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(url, part, resource.name, report)
        except _Broken:
            after = part.stat().st_size if part.exists() else 0
            if after <= before or attempt == ATTEMPTS - 1:
                raise
            continue
        found = _md5(part)
        if found == resource.md5:
            part.replace(folder / resource.name)
            return
        part.unlink()
        # What was there before may be the fault (another version, another mirror), so one attempt from
        # nothing.
        if not before or attempt == ATTEMPTS - 1:
            raise _Refused(f"MD5 {resource.md5} was expected, found {found}; it was removed")
    raise _Broken("the connection broke off again and again")


def _transfer(url: str, part: Path, name: str, report: Progress) -> None:
    """Appends to `part` what is missing of `url`; raises `_Broken` where the transfer ended early."""
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
                return  # all of it is here already: the checksum will tell
            raise _Refused(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(getattr(error, "reason", error)) or type(error).__name__) from error
    if total is not None and done < total:
        raise _Broken(f"the connection broke off after {done} of {total} bytes")


def _start(answer: http.client.HTTPResponse, have: int) -> int:
    """The position of the first byte of the answer; a server without ranges begins at 0."""
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    if not found or int(found[1]) != have:
        raise _Refused(f"bytes from {have} on were asked for, and the server sent others")
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
    """A fault of the disk is no fault of the network, and trying again does not mend it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"the disk does not take it: {error.strerror}", where=str(path)) from error


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
