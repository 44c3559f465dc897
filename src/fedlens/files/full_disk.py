"""The error of a command with many runs when the disk is full: what is kept, and how to continue."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fedlens.base.errors import FedlensError, RunFailed

CONTINUE = (
    "then run the same command again: it keeps the finished runs, and continues with those that are left"
)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Stopped = TypeVar("Stopped", bound=RunFailed)


def disk_full(error: BaseException | None) -> bool:
    """Whether an exception, or one that it follows from, says that a disk is full.

    >>> disk_full(OSError(errno.ENOSPC, "No space left on device")), disk_full(ValueError())
    (True, False)
    """
    return _refusal(error) is not None


@contextmanager
def stopped_when_full(kind: type[Stopped], thing: str, where: Path) -> Iterator[None]:
    """Turns an error of a full disk in the block into a `kind` that says how to continue; others pass.

    Args:
        thing: what has stopped, such as "the study".
        where: its folder, named if the error names no file.

    >>> with stopped_when_full(RunFailed, "the study", Path("study")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    fedlens.base.errors.RunFailed: the study stopped: the disk is full (study); free some space, then run the same ...
    """
    try:
        yield
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None or isinstance(error, kind):
            raise
        large = refusal.errno == errno.EFBIG
        advice = "raise the limit (ulimit -f)" if large else "free some space"
        what = "a file is larger than the limit" if large else "the disk is full"
        place = refusal.filename or where
        if isinstance(error, FedlensError):
            what, place = error.what, error.where or place
        raise kind(f"{thing} stopped: {what}", where=str(place), hint=f"{advice}, {CONTINUE}") from error


def _refusal(error: BaseException | None) -> OSError | None:
    """The error of the operating system that says that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None
