"""Files with secrets: mode 0600 in folders of mode 0700, replaced atomically, one writer at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedlens.base.errors import IdentityError
from fedlens.files.atomic_files import make_folder, open_unlinked, refuse_link, refused, write_atomically

LARGEST = 2**20
"""The largest file of secrets that is read, in bytes."""
_NUMBER = 20  # characters for the number of the process that has a folder


def private_folder(path: Path) -> Path:
    """Makes the folder with mode 0700, and returns its path.

    Raises `IdentityError` for a folder that other users can enter or that belongs to one, and `RunDirectoryError` for
    a link or a file.

    >>> import tempfile
    >>> oct(private_folder(Path(tempfile.mkdtemp()) / "ward-a").stat().st_mode & 0o777)
    '0o700'
    """
    refuse_link(path)
    if not path.exists():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    found = make_folder(path).stat()
    _check_mode(path, found.st_mode, "700")
    # The service that owns the folder could not read files written by another user.
    if found.st_uid != os.geteuid():
        what = f"{path.name} belongs to the user with number {found.st_uid}"
        raise IdentityError(what, where=str(path), hint=f"sudo --user '#{found.st_uid}' fedlens ...")
    return path


def write_private(path: Path, content: bytes) -> None:
    """Replaces the file atomically, with mode 0600. Raises `RunFailed` if the disk refuses."""
    write_atomically(path, content, mode=0o600)


def read_private(path: Path) -> bytes:
    """The contents of a file that only its owner can read.

    Raises `IdentityError` if it is missing, too large, or readable by others; `RunDirectoryError` for a link.
    """
    try:
        with os.fdopen(open_unlinked(path, os.O_RDONLY), "rb") as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode, "600")
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise IdentityError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error
    if len(content) > LARGEST:
        raise IdentityError(f"{path.name} is larger than {LARGEST:,} bytes", where=str(path))
    return content


@contextmanager
def one_writer(folder: Path, wait: bool = True) -> Iterator[None]:
    """Waits until no other process or thread changes the folder's files, and keeps them out during the block.

    Raises `RunFailed` if the disk refuses, and `IdentityError` if another one has the folder and `wait` is False.
    """
    path = folder / ".lock"
    with ExitStack() as held:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            held.callback(os.close, descriptor)
            if not wait and _locked(descriptor, fcntl.LOCK_EX):
                time.sleep(0.1)  # `in_use` has the lock for the moment in which it asks
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, b"%-*d" % (_NUMBER, os.getpid()), 0)
        except BlockingIOError:
            number = os.pread(descriptor, _NUMBER, 0).decode(errors="replace").strip()
            what = f"another process uses the folder {folder.name}: number {number}, as a rule 'fedlens site start'"
            raise IdentityError(what, where=str(folder), hint="stop it first") from None
        except OSError as error:
            raise refused(error, "the lock", path) from error
        yield


def in_use(folder: Path) -> bool:
    """Whether a process keeps others out of the folder; see `one_writer`. Writes nothing."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return _locked(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    """Whether another one has the lock; if not, this descriptor has it now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def service_passphrase() -> bytes | None:
    """The passphrase that systemd hands to a service as the credential `fedlens-passphrase`; None without one.

    Source: systemd.exec(5), `LoadCredentialEncrypted=`: a file of that name in `$CREDENTIALS_DIRECTORY`.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    path = Path(folder or "") / "fedlens-passphrase"
    return path.read_bytes().rstrip(b"\r\n") or None if folder and path.is_file() else None


def _check_mode(path: Path, mode: int, wanted: str) -> None:
    if stat.S_IMODE(mode) & 0o077:
        what = f"{path.name} is open to other users of this machine (mode {stat.S_IMODE(mode):04o})"
        raise IdentityError(what, where=str(path), hint=f"chmod {wanted} {path}")
