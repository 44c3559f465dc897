"""Files that are whole or not there at all, and the sentence when a disk refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlens.core.errors import RunFailed

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` when the block ends well and else is removed.

    Whoever reads `path` sees the old content or the new, whole, even where the process is killed in between.
    The block writes the temporary file and fsyncs it (`write_atomically` and `tensorfile.write` do).

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replacing(path) as temporary:
    ...     _ = temporary.write_text("new")
    >>> path.read_text(), [p.name for p in path.parent.iterdir()]
    ('new', ['note.txt'])
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one; raises `RunFailed`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "summary.json"
    >>> write_atomically(path, b"{}")
    >>> path.read_bytes()
    b'{}'
    """
    try:
        with replacing(path) as temporary:
            write_durably(temporary, content)
    except OSError as error:
        raise refused(error, path.name, path) from error


def write_durably(path: Path, content: bytes) -> None:
    """Write `content` and wait until the disk has it; raises `OSError`."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Wait until the disk has the names in `directory`: a rename is lost in a power cut without it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refused(error: OSError, thing: str, where: Path, hint: str | None = None) -> RunFailed:
    """The `RunFailed` that says why `thing` could not be written.

    >>> print(refused(OSError(errno.ENOSPC, "No space left on device"), "summary.json", Path("runs/a")))
    the disk is full, so summary.json could not be written (runs/a); free some space.
    >>> print(refused(OSError(errno.EACCES, "Permission denied"), "summary.json", Path("runs/a")))
    summary.json could not be written: Permission denied (runs/a); put that right.
    """
    if error.errno in _FULL:
        what, advice = f"the disk is full, so {thing} could not be written", "free some space"
    elif error.errno == errno.EFBIG:
        what = f"{thing} could not be written: it is larger than a file may be here"
        advice = "raise the limit (ulimit -f), or take another file system"
    else:
        what, advice = f"{thing} could not be written: {error.strerror or error}", "put that right"
    return RunFailed(what, where=str(where), hint=f"{advice}, {hint}" if hint else advice)
