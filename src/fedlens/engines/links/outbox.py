"""What waits for each site: messages, the blobs that they name, and answers that are arriving; and for the engine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedlens.core.wire.message import Message
from fedlens.engines.links.link import Arrived
from fedlens.engines.links.uploads import Upload


@dataclass(eq=False)
class Outgoing:
    """A message for a site; `accepted` once its answer counts, `check` while a complete answer is looked at."""

    message: Message
    upload: Upload | None = None
    accepted: bool = False
    check: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Drops what has arrived of its answer."""
        if self.upload is not None:
            self.upload.close()
        self.upload = self.check = None


@dataclass(eq=False)
class SiteQueue:
    """The messages for one site by their digests, and when and from where it was last heard of.

    `fresh` says that the site has not fetched its experiment yet: its polls end at once until it does.
    """

    messages: dict[bytes, Outgoing] = field(default_factory=dict)
    experiment: Message | None = None
    fresh: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # replaced when it is set
    seen: float = 0.0
    network: str = ""


class Outbox:
    """The queues of all sites, and the blobs that open messages name. It is used in the link's thread."""

    def __init__(self) -> None:
        self.sites: dict[str, SiteQueue] = {}
        self.blobs: dict[bytes, bytes] = {}

    def site(self, name: str) -> SiteQueue:
        """The queue of a site."""
        return self.sites.setdefault(name, SiteQueue())

    def post(self, name: str, message: Message, blobs: Mapping[bytes, bytes]) -> None:
        """Adds a message, and wakes the site's poll."""
        site = self.site(name)
        if message.purpose == "experiment":
            site.experiment, site.fresh = message, True
        else:
            site.messages[message.digest] = Outgoing(message)
        self.blobs.update(blobs)
        site.arrived.set()
        site.arrived = asyncio.Event()

    def keep(self, waiting: frozenset[bytes]) -> None:
        """Closes all asks but those with these digests, and frees the blobs that no message names any more."""
        for site in self.sites.values():
            for digest, each in list(site.messages.items()):
                if digest not in waiting and each.message.purpose == "ask":
                    del site.messages[digest]
                    if each.check is None:
                        each.close()
        named = {digest for name in self.sites for digest in self._named(name, accepted=True)}
        self.blobs = {digest: blob for digest, blob in self.blobs.items() if digest in named}

    def blob(self, name: str, digest: bytes) -> bytes | None:
        """The blob with this SHA-256, if a message that is open for this site names it."""
        return self.blobs.get(digest) if digest in self._named(name, accepted=False) else None

    def _named(self, name: str, accepted: bool) -> set[bytes]:
        site = self.sites.get(name, SiteQueue())
        messages = [each.message for each in site.messages.values() if accepted or not each.accepted]
        messages += [] if site.experiment is None else [site.experiment]
        return {digest for each in messages for digest in (each.fields.payload, each.fields.shared)}


class Inbox:
    """What has arrived for the engine, which may compute for an hour: of a site's censuses only the last one is kept.

    All threads may use it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arrived | str | None] = queue.SimpleQueue()
        self._censuses: dict[str, Arrived] = {}
        self._lock = threading.Lock()

    def put(self, arrived: Arrived | None) -> None:
        """Adds an answer, or None to wake the engine."""
        self._queue.put(arrived)

    def put_census(self, census: Arrived) -> None:
        """Adds a census, in place of an earlier one of its site."""
        with self._lock:
            if census.site not in self._censuses:
                self._queue.put(census.site)
            self._censuses[census.site] = census

    def get(self, seconds: float) -> Arrived | None:
        """The next message; waits for it for at most so many seconds. Raises `queue.Empty` without one."""
        found = self._queue.get(timeout=seconds) if seconds else self._queue.get_nowait()
        if not isinstance(found, str):
            return found
        with self._lock:
            return self._censuses.pop(found)
