"""A lock that one process holds, and that goes with it when it dies."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedlens.core.errors import RunDirectoryError

_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_held: set[int] = set()


@contextmanager
def locked(path: Path, thing: str) -> Iterator[None]:
    """Hold the lock file at `path` for the length of the block; the file itself stays.

    Raises `RunDirectoryError` at once where another holds it, in this process or in another. On a file system
    that has no locks (some network ones) nothing is held.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / ".lock"
    >>> with locked(path, "the run"):
    ...     with locked(path, "the run"):
    ...         pass
    Traceback (most recent call last):
    fedlens.core.errors.RunDirectoryError: ...
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunDirectoryError(f"{thing} cannot be locked: {error.strerror}", where=str(path)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                raise _busy(descriptor, thing) from None
        _held.add(descriptor)
        with suppress(OSError):  # the number is for the sentence of `_busy` alone
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
