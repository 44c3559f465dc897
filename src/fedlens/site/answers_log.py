"""The log of a site's answers: an answer is on the disk before it is sent, and no line is ever taken back.

`answers.jsonl` has a line an answer: a JSON object with sorted keys, whose line break says that it is whole. `head` is
the SHA-256 over the head of the line before and the line without it, so that a line that was changed or removed is
found. The bytes of an answer lie in a file of their own, until the next ask shows that the server has them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import DataError, FedlensError
from fedlens.base.parse_text import parse_json
from fedlens.core.wire.message import Message
from fedlens.files.atomic_files import (
    create,
    fsync_directory,
    open_readable,
    open_unlinked,
    refused,
    replacing,
    sweep,
)
from fedlens.identity.private_files import private_folder

_NAME = "answers.jsonl"
_LONGEST = 2**16  # bytes of a line
_FIELDS = frozenset({"run", "attempt", "round", "exchange", "slot", "client", "operation"})
_NONE = bytes(32)  # the head of an empty log


class AskRefused(FedlensError):
    """An ask that the site does not answer. Its text stays at the site; `reason` is one of `post.REASONS`."""

    def __init__(self, reason: str, what: str) -> None:
        self.reason = reason
        super().__init__(what, where="ask")


@dataclass
class _Run:
    """The asks of a run's newest attempt that were answered: the digest of each by its `Id`."""

    attempt: int = 0
    asks: dict[tuple[int, int, int], bytes] = field(default_factory=dict)


class AnswersLog:
    """What a site has answered.

    Args:
        folder: of the log, of mode 0700.
        bodies: a folder for the answers that the server may not have yet, of mode 0700.
        clock: gives the seconds since 1970 that a line is dated with.

    Attributes:
        head: the head of the last line, 32 bytes; zeros for an empty log.

    A last line that is cut, as by a kill, is removed: its answer was not sent. Raises `DataError` for any other damage,
    `IdentityError` for a folder that others can read, and `RunFailed` if the disk refuses.
    """

    def __init__(self, folder: Path, bodies: Path, clock: Callable[[], float] = time) -> None:
        self._path, self._bodies, self._clock = private_folder(folder) / _NAME, private_folder(bodies), clock
        self.head = _NONE
        self._runs: dict[str, _Run] = {}
        self._waiting: set[bytes] = set()  # the asks whose answers are in files
        try:
            if not self._path.exists():
                os.close(create(self._path, 0o600))
                fsync_directory(self._path.parent)
            self._size = self._read()
            self._file = open_unlinked(self._path, os.O_RDWR | os.O_APPEND)
            if os.fstat(self._file).st_size > self._size:
                self._cut()
            self._sweep()
        except OSError as error:
            raise refused(error, "the log of answers", self._path) from error

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self) -> int:
        """Reads all whole lines, and returns where the last one ends."""
        end = 0
        with open_readable(self._path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
                if not line.endswith(b"\n"):
                    if len(line) == _LONGEST:
                        raise self._damaged(number)
                    break
                try:
                    values = parse_json(line.decode())
                    head = bytes.fromhex(values.pop("head"))
                    if head != _chained(self.head, _text(values)) or line != _line(values, head):
                        raise ValueError
                    self._known(values)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise self._damaged(number) from None
                self.head, end = head, end + len(line)
        return end

    def _known(self, values: Mapping[str, Any]) -> None:
        run = self._runs.setdefault(values["run"], _Run())
        if values["attempt"] > run.attempt:
            run.attempt, run.asks = values["attempt"], {}
        digest = bytes.fromhex(values["ask"])
        run.asks[values["round"], values["exchange"], values["slot"]] = digest
        if (self._bodies / digest.hex()).exists():
            self._waiting.add(digest)

    def _damaged(self, number: int) -> DataError:
        return DataError(
            f"the log of answers is damaged in line {number}, so the site does not know what it has answered",
            where=str(self._path),
            hint="move the site's folder away, and join again with a new invitation",
        )

    def _sweep(self) -> None:
        """Removes what a kill left: answers that are not in the log, and temporary files."""
        sweep(self._bodies)
        named = {digest.hex() for digest in self._waiting}
        for path in self._bodies.iterdir():
            if path.name not in named:
                path.unlink()

    # -- answers --------------------------------------------------------------------------------------------------

    def find(self, ask: Message) -> mmap.mmap | None:
        """The stored answer to this very ask, head and body; None if it was not answered.

        Raises `AskRefused` if another ask was answered under its `Id` and attempt, if its attempt is over, or if the
        server has acknowledged the answer.
        """
        fields = ask.fields
        run = self._runs.get(fields.run, _Run())
        if fields.attempt < run.attempt:
            raise AskRefused("refused", f"an ask of attempt {fields.attempt}, and there was {run.attempt}")
        if fields.attempt > run.attempt:
            return None
        answered = run.asks.get((fields.round, fields.exchange, fields.slot))
        if answered is None:
            return None
        if answered != ask.digest:
            raise AskRefused("refused", "another ask was answered under the same number")
        if ask.digest not in self._waiting:
            raise AskRefused("refused", "the server has acknowledged the answer")
        return self._stored(ask.digest)

    def _stored(self, ask: bytes) -> mmap.mmap:
        with open_readable(self._bodies / ask.hex()) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def keep(
        self, ask: Message, answer: Message, body: bytes, about: Mapping[str, Any] | None = None
    ) -> mmap.mmap:
        """Writes an answer and its line to the disk, and returns the answer's bytes, which may now be sent.

        Args:
            ask: for which `find` returns None.
            answer: made with `head` as that of the log.
            body: of the answer.
            about: more plain values for the line.

        Raises `RunFailed` if the disk refuses; nothing is answered then, and the log is as before.
        """
        fields, path = ask.fields, self._bodies / ask.digest.hex()
        values = {
            **(about or {}),
            **{name: value for name, value in fields._asdict().items() if name in _FIELDS},
            "outcome": answer.details["outcome"],
            "reason": answer.details.get("reason"),
            "ask": ask.digest.hex(),
            "answer": answer.digest.hex(),
            "payload": answer.fields.payload.hex(),
            "bytes": len(body),
            "time": int(self._clock()),
        }
        try:
            with replacing(path) as temporary, open(create(temporary, 0o600), "wb", buffering=0) as file:
                for part in (answer.head, body):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
                os.fsync(file.fileno())
            self._append(values)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise refused(error, "an answer", self._path) from error
        self._known(values)
        return self._stored(ask.digest)

    def _append(self, values: Mapping[str, Any]) -> None:
        head = _chained(self.head, _text(values))
        line = _line(values, head)
        if os.fstat(self._file).st_size != self._size:  # an earlier line was written in part, and not cut
            self._cut()
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            self._cut()
            raise
        self.head, self._size = head, self._size + len(line)

    def _cut(self) -> None:
        """Removes the part of a line that was not written whole."""
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)

    def acknowledge(self, unsent: Collection[bytes]) -> None:
        """Removes the stored answers, except to these asks: a new ask says that the server has the others.

        The lines stay. The server sends the asks whose answers it lacks before any new one.
        """
        for digest in self._waiting - set(unsent):
            (self._bodies / digest.hex()).unlink(missing_ok=True)
            self._waiting.discard(digest)


def _text(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _line(values: Mapping[str, Any], head: bytes) -> bytes:
    return _text({**values, "head": head.hex()}) + b"\n"


def _chained(head: bytes, text: bytes) -> bytes:
    return hashlib.sha256(head + text).digest()
