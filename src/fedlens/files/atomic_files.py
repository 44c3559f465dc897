"""Atomic writes that follow no planted link, reads that never block, and the error when a disk refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedlens.base.errors import RunDirectoryError, RunFailed
from fedlens.files.regular_file import NotRegularError, open_descriptor

_FULL = {errno.ENOSPC, errno.EDQUOT}
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_SERIALIZING = re.compile(r"\.tmp\w{6}")  # what the safetensors library writes to before it renames


def temporary_beside(path: Path) -> Path:
    """An unused name in the same folder: `.NAME.<16 random hexadecimal digits>.tmp`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def create(path: Path, mode: int = 0o666) -> int:
    """A descriptor of a new file, to write to. Raises `FileExistsError` for any entry of that name, links included."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def open_unlinked(path: Path, flags: int) -> int:
    """A descriptor of the regular file at `path`; symbolic links, FIFOs and devices are refused without waiting.

    Raises `RunDirectoryError` if it is anything else, and `OSError` if it cannot be opened.
    """
    try:
        return open_descriptor(path, flags | os.O_NOFOLLOW)
    except NotRegularError:
        raise not_regular(path) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and os.path.lexists(path):
            raise not_regular(path) from None
        raise


def not_regular(path: Path) -> RunDirectoryError:
    """The error for an entry of a run directory that is not a regular file."""
    what = f"{path.name} is a symbolic link" if path.is_symlink() else f"{path.name} is not a regular file"
    return RunDirectoryError(what, where=str(path), hint="fedlens never creates these; remove it")


def make_folder(path: Path) -> Path:
    """Makes a folder inside the directory of a run or a study, with its parents, and returns its path.

    Raises `RunDirectoryError` for a link, which would lead the files to be written elsewhere, and for a file; and
    `RunFailed` if the disk refuses.

    >>> import tempfile
    >>> make_folder(Path(tempfile.mkdtemp()) / "tables").name
    'tables'
    """
    refuse_link(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        what, hint = f"{path.name} is not a folder", "move it away"
        raise RunDirectoryError(what, where=str(path), hint=hint) from None
    except OSError as error:
        raise refused(error, path.name, path) from error
    return path


def refuse_link(path: Path) -> None:
    """Raises `RunDirectoryError` if the folder `path` is a link: what is written to it would lie elsewhere."""
    if path.is_symlink():
        raise not_regular(path)


def open_readable(path: Path) -> BinaryIO:
    """A file of the directory of a run or a study, open for reading.

    Raises `RunDirectoryError` for a link, a FIFO, a device or a directory, without waiting, and `OSError` if the file
    cannot be opened. A link is refused because pages show what is read: it could lead to any file of the reader.
    """
    return os.fdopen(open_unlinked(path, os.O_RDONLY), "rb")


def read_regular(path: Path) -> bytes:
    """The contents of a file of the directory of a run or a study. Raises what `open_readable` raises."""
    with open_readable(path) as file:
        return file.read()


@contextmanager
def replacing(path: Path, named: bool = True) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` when the block ends without an error, else is removed.

    Readers of `path` see the old content or the new, even if the process is killed in between. The block creates the
    temporary file and fsyncs it (`write_atomically` and `tensorfile.write` do). A link at `path` is replaced itself.
    Without `named` the new name is not waited for: a later `fsync_directory` makes it survive a power cut.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "note.txt"
    >>> with replacing(path) as temporary:
    ...     _ = temporary.write_text("new")
    >>> path.read_text(), [p.name for p in path.parent.iterdir()]
    ('new', ['note.txt'])
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
        if named:
            fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A path beside `folder`: the folder that the block makes there takes its place, or is removed after an error.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "runs" / "first"
    >>> with replacing_folder(folder) as beside:
    ...     beside.mkdir()
    >>> [path.name for path in folder.parent.iterdir()]
    ['first']
    """
    beside = temporary_beside(folder)
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_atomically(
    path: Path, content: bytes, named: bool = True, hint: str | None = None, mode: int = 0o666
) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one; raises `RunFailed`.

    `named` is that of `replacing`, `hint` that of `refused`, `mode` that of the new file (less the umask).

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "summary.json"
    >>> write_atomically(path, b"{}")
    >>> path.read_bytes()
    b'{}'
    """
    try:
        with ExitStack() as held, replacing(path, named) as temporary:
            file = held.enter_context(open(create(temporary, mode), "wb"))
            # Locked until it has its name: `sweep` of another process leaves it alone.
            with suppress(OSError):
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file.fileno(), content)
    except OSError as error:
        raise refused(error, path.name, path, hint) from error


def write_durably(path: Path, content: bytes) -> None:
    """Create the file `path` with this content and wait until the disk has it.

    Raises `OSError`, as on a full disk; no part of the file is left then.
    """
    with open(create(path), "wb") as file:
        try:
            _write(file.fileno(), content)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def sweep(directory: Path) -> None:
    """Remove the temporary files that killed processes left in `directory`; those being written stay.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> (directory / ".summary.json.0123456789abcdef.tmp").touch()
    >>> sweep(directory)
    >>> list(directory.iterdir())
    []
    """
    with suppress(OSError):  # a leftover that cannot be removed is no reason to end a run
        for path in list(directory.iterdir()):
            if _LEFTOVER.fullmatch(path.name) or _SERIALIZING.fullmatch(path.name):
                with suppress(OSError):
                    if (
                        path.is_symlink()
                        or not stat.S_ISREG(path.lstat().st_mode)
                        or not _being_written(path)
                    ):
                        path.unlink()


def _being_written(path: Path) -> bool:
    descriptor = open_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN)
    finally:
        os.close(descriptor)
    return False


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
    summary.json could not be written: Permission denied (runs/a); check the disk and the permissions.
    """
    if error.errno in _FULL:
        what, advice = f"the disk is full, so {thing} could not be written", "free some space"
    elif error.errno == errno.EFBIG:
        what = f"{thing} could not be written: it is larger than the largest allowed file"
        advice = "raise the limit (ulimit -f), or use another file system"
    else:
        what = f"{thing} could not be written: {error.strerror or error}"
        advice = "check the disk and the permissions"
    return RunFailed(what, where=str(where), hint=f"{advice}, {hint}" if hint else advice)
