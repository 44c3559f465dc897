"""A lock that one process holds, released when the process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedlens.base.errors import RunDirectoryError
from fedlens.files.atomic_files import open_unlinked

_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_PROCESS = re.compile(rb"(\d{1,20}\n)?")  # a process id, or nothing yet
_held: set[int] = set()


@contextmanager
def locked(path: Path, thing: str) -> Iterator[None]:
    """Hold the lock file at `path` during the block; the file itself stays.

    Raises `RunDirectoryError` at once if it is held already, by this process or another, or if `path` is not a lock
    file: a link, a FIFO, a file with other contents. On a file system without locks (some network ones) nothing is
    held.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / ".lock"
    >>> with locked(path, "the run"):
    ...     with locked(path, "the run"):
    ...         pass
    Traceback (most recent call last):
    fedlens.base.errors.RunDirectoryError: ...
    """
    try:
        descriptor = open_unlinked(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunDirectoryError(f"{thing} cannot be locked: {error.strerror}", where=str(path)) from error
    try:
        if not _PROCESS.fullmatch(os.pread(descriptor, 64, 0)):
            # A hard link to a file of the user would be overwritten below.
            raise RunDirectoryError(
                f"{path.name} is not a lock file of fedlens", where=str(path), hint="remove it"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                raise _busy(descriptor, thing) from None
        _held.add(descriptor)
        with suppress(OSError):  # the number is only for the message of `_busy`
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _busy(descriptor: int, thing: str) -> RunDirectoryError:
    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    by = f"process {holder}" if holder.isdigit() else "another process"
    return RunDirectoryError(f"{thing} is in use by {by}", hint="wait for it to end, or stop it")


def _let_go_in_child() -> None:
    """A forked worker gets its own handle on the lock, and would hold it past the death of its parent."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
