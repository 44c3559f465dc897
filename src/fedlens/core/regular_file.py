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
    fedlens.core.regular_file.NotRegularError: it is a device, not a file
    """
    # A pipe is opened without waiting for its other end; a terminal does not become the process's own.
    flags = 0 if sys.platform == "win32" else os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegularError(errno.EINVAL, f"it is {_KINDS[stat.S_IFSOCK]}, not a file") from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise NotRegularError(errno.EINVAL, f"it is {_KINDS.get(kind, 'special')}, not a file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
