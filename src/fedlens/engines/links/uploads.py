"""Receives answers in pieces, and checks them when they are complete."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from fedlens.core.wire.message import MOST_HEAD, Message, MessageError, check_body, read

_IN_MEMORY = 2**18  # bytes of an answer that needs no file
_PIECE = 2**20


@dataclass(eq=False)
class Upload:
    """The answer to one ask, as far as it has arrived.

    Attributes:
        total: the bytes of the whole answer, as its first piece said.
        received: how many of them have arrived.
        writer: the request that may write; a later one takes over from one whose connection hangs.
    """

    folder: Path
    most: int
    total: int | None = None
    received: int = 0
    writer: object = None
    file: IO[bytes] = field(init=False)

    def __post_init__(self) -> None:
        # It has no name, so nothing is left of it after a crash.
        self.file = SpooledTemporaryFile(_IN_MEMORY, dir=str(self.folder))  # noqa: SIM115 - `Arrived` closes it

    def begin(self, writer: object, start: int, total: int) -> None:
        """Lets a request write from byte `start`. Raises `MessageError` if it does not continue what has arrived."""
        if total > self.most:
            what = f"an answer of {total:,} bytes, and at most {self.most:,} can fit what was asked"
            raise MessageError("too large", what)
        if start != self.received or self.total not in (None, total):
            raise MessageError("offset", f"it goes on at byte {start:,}, and {self.received:,} have arrived")
        self.writer, self.total = writer, total

    def write(self, writer: object, piece: bytes) -> None:
        """Appends a piece. Raises `MessageError` if it is beyond the end, or another request has taken over."""
        if self.writer is not writer or self.total is None or self.received + len(piece) > self.total:
            raise MessageError(
                "offset", "another request continues this answer, or it is longer than it said"
            )
        self.file.write(piece)
        self.received += len(piece)

    def close(self) -> None:
        """Drops what has arrived; a request that still writes is refused."""
        self.writer = None
        with suppress(OSError):  # a full disk fails again when the file is closed
            self.file.close()

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.received == self.total

    def checked(self, ask: Message, identity: bytes) -> Message:
        """The head of a complete answer to `ask`; raises `MessageError` if it is none, or not signed by `identity`."""
        self.file.seek(0)
        message = read(self.file, identity)
        if (field := message.fault_as_answer_to(ask)) is not None:
            raise MessageError("mismatch", f"its field '{field}' is not that of the ask")
        start, digest = self.file.tell(), hashlib.sha256()
        while piece := self.file.read(_PIECE):
            digest.update(piece)
        check_body(message, digest.digest(), self.received - start)
        return message


def most_of_answer(ask: Message, most: int) -> int:
    """The bytes of the longest answer to an ask, which names that of its body as `most` in its details."""
    return min(most, int(ask.details.get("most", most))) + MOST_HEAD
