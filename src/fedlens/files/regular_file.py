"""Opens files that a user named: regular files only, so that a pipe or a device never blocks a command."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class NotRegularError(OSError):
    """A path leads to a pipe, a socket, a device or a directory."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading; links are followed. Raises `OSError`, `NotRegularError` if it is not a regular file.

    >>> open_regular(Path("/dev/null"))
    Traceback (most recent call last):
    fedlens.files.regular_file.NotRegularError: it is a device, not a file
    """
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def too_long(path: Path) -> bool:
    """Whether the file system refuses a path because of its length.

    >>> too_long(Path("a" * 6000)), too_long(Path("a"))
    (True, False)
    """
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return False


def open_descriptor(path: Path, flags: int) -> int:
    """A descriptor of the regular file at `path`, opened with `flags` of `os.open`, without waiting.

    Raises `OSError`, `NotRegularError` if it is not a regular file.
    """
    # A pipe is opened without waiting for its other end; a terminal does not become the process's own.
    safely = 0 if sys.platform == "win32" else os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | safely, 0o666)
    except OSError as error:
        # A socket, a pipe that nobody reads, a directory to write to.
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise _not_regular(os.stat(path).st_mode) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _not_regular(mode)
    return descriptor


def _not_regular(mode: int) -> NotRegularError:
    return NotRegularError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'special')}, not a file")
