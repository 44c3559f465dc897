"""The log of what a server has sent: digests of messages, whose chain every message carries as its `head`."""

from __future__ import annotations

import hashlib
import os
from functools import reduce
from pathlib import Path

from fedlens.files.atomic_files import open_unlinked, read_regular, refused

_SIZE = 32  # bytes of a digest


def chained(head: bytes, digest: bytes) -> bytes:
    """The head after one more message: SHA-256 over the head before and the digest of the message."""
    return hashlib.sha256(head + digest).digest()


class SentLog:
    """The digests of all messages of a run, 32 bytes each, in a file that its owner alone can read.

    A line that a kill has cut is removed: its message was not sent. Whoever has one message can see from its head
    whether the messages before it are those of the file.

    Args:
        path: the file; it is made if it is missing.

    Attributes:
        head: the head after the last message; 32 zeros before the first.

    Raises `RunFailed` if the disk refuses, `RunDirectoryError` for a link.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "sent.sha256"
    >>> log = SentLog(path)
    >>> log.add(bytes(32))
    >>> SentLog(path).head == log.head == chained(bytes(32), bytes(32))
    True
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open_unlinked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            os.fchmod(self._file, 0o600)
            content = read_regular(path)
            whole = len(content) - len(content) % _SIZE
            os.ftruncate(self._file, whole)
        except OSError as error:
            raise refused(error, path.name, path) from error
        digests = (content[at : at + _SIZE] for at in range(0, whole, _SIZE))
        self.head = reduce(chained, digests, bytes(_SIZE))

    def add(self, digest: bytes) -> None:
        """Adds a message, before it is sent; all or nothing. It outlives a kill, and after `sync` a power cut."""
        try:
            before = os.fstat(self._file).st_size
            if os.write(self._file, digest) < len(digest):
                os.ftruncate(self._file, before)
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise refused(error, self._path.name, self._path) from error
        self.head = chained(self.head, digest)

    def sync(self) -> None:
        """Waits until the disk has all messages."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise refused(error, self._path.name, self._path) from error

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
