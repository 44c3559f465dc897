"""Notices which files are read, so that what was read from them can be kept until one of them changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Stamp = tuple[int, int]  # time of the last change in nanoseconds, and size

_LISTINGS = ("os.listdir", "os.scandir")
_WITHOUT_STAMP = ("/proc/", "/sys/", "/dev/")  # their files have no meaningful times
_WRITING = os.O_WRONLY | os.O_RDWR
_recording: list[dict[str, Stamp]] = []
_hooked = False


@contextmanager
def recorded_files() -> Iterator[dict[str, Stamp]]:
    """The files that this process opens for reading in the block, and the folders it lists, each with its stamp.

    The stamp is taken before the file is read: a change during the block is a change. Files opened by libraries that
    do not use Python's `open` are not seen; no reader of fedlens uses one.

    >>> import tempfile
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "labels.txt"
    >>> _ = path.write_text("cat")
    >>> with recorded_files() as files:
    ...     _ = path.read_text()
    >>> list(files) == [str(path)], unchanged(files)
    (True, True)
    >>> _ = path.write_text("a dog")
    >>> unchanged(files)
    False
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_opened)  # a process cannot take a hook back, so one serves all blocks
        _hooked = True
    files: dict[str, Stamp] = {}
    _recording.append(files)
    try:
        yield files
    finally:
        # By identity: two blocks that have read the same files are equal.
        at = next(k for k, other in enumerate(_recording) if other is files)
        del _recording[at]


def unchanged(files: dict[str, Stamp]) -> bool:
    """Whether all files still have the time and size of their stamps."""
    return all(stamp_of(path) == stamp for path, stamp in files.items())


def stamp_of(path: str) -> Stamp | None:
    """The time and size of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def _opened(event: str, arguments: tuple[Any, ...]) -> None:
    if not _recording or (event != "open" and event not in _LISTINGS):
        return
    given, flags = arguments[0], arguments[2] if event == "open" else 0
    path = "." if given is None and event != "open" else given
    if not isinstance(path, str | bytes | os.PathLike) or (isinstance(flags, int) and flags & _WRITING):
        return
    name = os.path.abspath(os.fsdecode(path))
    if name.startswith(_WITHOUT_STAMP) or name.endswith(".pyc"):
        return
    stamp = stamp_of(name)
    if stamp is not None:
        for files in _recording:
            files[name] = stamp
