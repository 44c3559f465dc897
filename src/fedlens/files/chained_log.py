"""A log of JSON lines of which each has the SHA-256 over those before it, so that a changed or removed line is found.

A line is an object with sorted keys, and its line break says that it is whole. Its `head` is the SHA-256 over the head
of the line before (32 zeros before the first) and the line without `head`. A tail that is cut off is found only by
whoever knows a later head or the count of lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlens.base.errors import DataError
from fedlens.base.parse_text import parse_json
from fedlens.files.atomic_files import create, fsync_directory, open_readable, open_unlinked

NONE = bytes(32)
"""The head of an empty log."""
LONGEST = 2**20
"""Bytes of a line."""


class ChainedLog:
    """Appends lines to a file that its owner alone can read. One thread of a process at a time may write.

    Args:
        path: the file; it is made if it is missing.
        each: receives the values of each line that is read at the start.
        hint: says what to do about a damaged log.

    Another process may append too: its lines are read before the next one is written. A last line that is cut, as by a
    kill, is removed. Raises `DataError` for any other damage, `OSError` if the disk refuses, and `RunDirectoryError`
    for a link.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "answers.jsonl"
    >>> log = ChainedLog(path)
    >>> log.append({"round": 1})
    >>> log.append({"round": 2})
    >>> [values["round"] for values, _, _ in read_chained(path)], log.count
    ([1, 2], 2)
    """

    def __init__(
        self,
        path: Path,
        each: Callable[[Mapping[str, Any]], None] = lambda values: None,
        hint: str = "find out who changed it; move it away to start a new one",
    ) -> None:
        self.path, self._size, self._heads = path, 0, bytearray()
        self._each, self._hint = each, hint
        self._once: set[str] = set()
        if not path.exists():
            os.close(create(path, 0o600))
            fsync_directory(path.parent)
        self._file = open_unlinked(path, os.O_RDWR | os.O_APPEND)
        try:
            with self._locked():
                pass
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many lines it has."""
        return len(self._heads) // 32

    @property
    def head(self) -> bytes:
        """The head of the last line, 32 bytes; zeros for an empty log."""
        return bytes(self._heads[-32:]) or NONE

    def head_at(self, count: int) -> bytes | None:
        """The head that the log had with so many lines; None if it has fewer."""
        if not 0 <= count <= self.count:
            return None
        return bytes(self._heads[32 * count - 32 : 32 * count]) if count else NONE

    def append(self, values: Mapping[str, Any], sync: bool = True) -> None:
        """Appends a line, all or nothing; with `sync` it is on the disk. Raises `OSError` if the disk refuses."""
        with self._locked():
            head = _chained(self.head, _text(values))
            line = _line(values, head)
            if len(line) > LONGEST:
                raise ValueError(f"a line of {len(line):,} bytes")
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._file, left) :]
                if sync:
                    os.fsync(self._file)
            except OSError:
                self._cut()
                raise
            self._added(values, head, self._size + len(line))

    def once(self, kind: str, values: Mapping[str, Any], time: int) -> str:
        """Appends a line of this kind unless the log has it, and returns its `id`: the digest of its values."""
        id = hashlib.sha256(_text({"kind": kind, **values})).hexdigest()[:16]
        if id not in self._once:
            self.append({"kind": kind, "id": id, "time": time, **values}, sync=False)
        return id

    def sync(self) -> None:
        """Waits until the disk has all lines. Raises `OSError` if it refuses."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """No other process writes meanwhile; what others have written is known, and a line in part is cut."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if os.fstat(self._file).st_size != self._size:
                after = self.count, self._size, self.head
                for values, head, end in read_chained(self.path, self._hint, after):
                    try:
                        self._each(values)
                    except (ValueError, KeyError, TypeError, AttributeError):
                        raise _damaged(self.path, self.count + 1, self._hint) from None
                    self._added(values, head, end)
            if os.fstat(self._file).st_size != self._size:
                self._cut()
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _added(self, values: Mapping[str, Any], head: bytes, end: int) -> None:
        self._heads += head
        self._size = end
        if isinstance(id := values.get("id"), str):
            self._once.add(id)

    def _cut(self) -> None:
        """Removes the part of a line that was not written whole."""
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)


def read_chained(
    path: Path,
    hint: str = "compare it with what the other side has",
    after: tuple[int, int, bytes] = (0, 0, NONE),
) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """The whole lines of a log, each with its head and the byte at which it ends. Another process may append to it.

    Args:
        path: of the log.
        hint: says what to do about a damaged log.
        after: how many lines not to read: their number, their bytes, and the head of the last of them.

    Raises `DataError` with the number of the first line that does not follow from those before it: it was changed,
    or a line before it was removed, added or moved.
    """
    known, end, last = after
    with open_readable(path) as file:
        file.seek(end)
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), start=known + 1):
            if not line.endswith(b"\n") and len(line) < LONGEST:
                return
            try:
                values = parse_json(line.decode())
                head = bytes.fromhex(values.pop("head"))
                if head != _chained(last, _text(values)) or line != _line(values, head):
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise _damaged(path, number, hint) from None
            last, end = head, end + len(line)
            yield values, head, end


def _damaged(path: Path, number: int, hint: str) -> DataError:
    return DataError(
        f"the log is damaged in line {number}: the line was changed, or one before it was removed, added or moved",
        where=str(path),
        hint=hint,
    )


def _text(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _line(values: Mapping[str, Any], head: bytes) -> bytes:
    return _text({**values, "head": head.hex()}) + b"\n"


def _chained(head: bytes, text: bytes) -> bytes:
    return hashlib.sha256(head + text).digest()
