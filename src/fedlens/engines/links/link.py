"""What a link to the sites of a federation is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import IO, Protocol

from fedlens.core.wire.message import Message

Notice = Callable[[str, str, str], None]
"""Receives a kind, the name of a site and one sentence, for the log. It is called in the link's thread."""


@dataclass(frozen=True)
class Arrived:
    """A message from a site, whose signature and digests were verified. Its body waits in a file without a name."""

    site: str
    message: Message
    file: IO[bytes]

    def body(self) -> bytes:
        """The body, once: the file is closed."""
        with self.file:
            self.file.seek(-self.message.details["size"], 2)
            return self.file.read()


class Link(Protocol):
    """Carries messages to sites and back. A site is a name; which clients it has is the engine's business."""

    @abstractmethod
    def online(self) -> Mapping[str, float]:
        """The seconds since each site that ever came was last heard of."""

    @abstractmethod
    def send(self, site: str, message: Message, blobs: Mapping[bytes, bytes], /) -> None:
        """Keeps a message for a site until it is answered, or acknowledged if it is no ask.

        `blobs` are the body of the message and what its `shared` names, by their SHA-256. A message with the purpose
        "experiment" replaces the one before it.
        """

    @abstractmethod
    def collect(self, seconds: float, waiting: Collection[bytes], /) -> list[Arrived]:
        """The messages that have arrived; waits for the first one for at most so many seconds.

        `waiting` are the digests of the asks whose answers still count. All others are closed: their blobs are freed,
        and answers to them are refused as late.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes all connections. May be called twice."""
