"""Sites that answer without training: many in one thread, over real TLS, to try a server with a large federation."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedlens.core.schema import Field, NumberField, Schema, TreeField
from fedlens.core.wire.message import Message
from fedlens.core.wire.plain_schema import from_plain
from fedlens.engines.links.https import HttpsLink
from fedlens.engines.links.post import answer_body
from fedlens.identity.keys import KeyPair
from fedlens.identity.site_keys import SiteKeys
from fedlens.site.connection import Timing
from tests.link_kit import At, Federation, answer_to, beside

TIMING = Timing(quiet=300, first=0.1, longest=5)


def zeros(expect: Schema) -> tuple[bytes, dict[str, float]]:
    """The body and the metrics of the smallest reply that fits."""

    def one(field: Field) -> Any:
        if isinstance(field, NumberField):
            return min(max(field.above, 0.0) + 1.0, field.most)
        if isinstance(field, TreeField):
            return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in field.leaves.items()}
        return torch.zeros([max(extent, 0) for extent in field.shape], dtype=field.dtype)

    payload = {name: one(field) for name, field in (expect.fields or {}).items()}
    return answer_body(payload), {name: max(bound.least, 0.0) for name, bound in expect.metrics.items()}


@dataclass
class LightSites:
    """The sites of a federation in a thread of their own.

    Attributes:
        seen: called in that thread with each ask.
        answered: how many answers counted.
    """

    federation: Federation
    sites: Sequence[SiteKeys]
    seen: Callable[[Message], None] = lambda ask: None
    answered: int = 0
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._replies: dict[str, tuple[bytes, dict[str, float]]] = {}

    @contextlib.contextmanager
    def here(self, link: HttpsLink) -> Iterator[None]:
        """Connects all of them during the block."""
        stop = asyncio.Event()
        loop: list[asyncio.AbstractEventLoop] = []

        async def all_sites() -> None:
            loop.append(asyncio.get_running_loop())
            tasks = [asyncio.create_task(self._site(keys)) for keys in self.sites]
            tasks.append(asyncio.create_task(stop.wait()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

        with beside(all_sites, seconds=3000):
            try:
                while len(link.online()) < len(self.sites):
                    link.collect(0.05, [])
                yield
            finally:
                loop[0].call_soon_threadsafe(stop.set)

    async def _site(self, keys: SiteKeys) -> None:
        key = keys.identity()
        async with At(keys, options={"timing": TIMING}, troubles=self.troubles) as connection:
            while True:
                received = await connection.next([])
                if received is not None:
                    ask = received[0]
                    self.seen(ask)
                    counts = await connection.answer(ask.digest, self._reply(ask, key))
                    self.answered += counts

    def _reply(self, ask: Message, key: KeyPair) -> list[bytes]:
        expect = ask.details["expect"]
        kind = json.dumps(expect, sort_keys=True)
        if kind not in self._replies:
            self._replies[kind] = zeros(from_plain(expect))
        body, metrics = self._replies[kind]
        return answer_to(ask, key, body=body, details={"metrics": metrics})
