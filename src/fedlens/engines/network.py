"""The engine of a real federation: asks go to sites, and what does not come back in time is a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.device_copies import downloaded
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import (
    Answer,
    Ask,
    ClientDataSource,
    ClientId,
    ClientStates,
    Failure,
    Id,
    Op,
    Program,
    Reply,
    Request,
)
from fedlens.core.random import random_state_kept
from fedlens.core.schema import NumberField, Schema
from fedlens.core.states import AT_SITE
from fedlens.core.types import is_client
from fedlens.core.wire.sent_fields import answer_fields
from fedlens.data.partition.quorum import Quorum
from fedlens.data.partition.roster import Roster
from fedlens.engines.devices import ON_CPU, ChannelsLast, Computing, Device, PrecisionSetting, resolved
from fedlens.engines.executor import Executor, Item, reduced
from fedlens.engines.inline import Threads, item_of
from fedlens.engines.schedule import LATE
from fedlens.engines.traits import EngineTraits, declares

if TYPE_CHECKING:  # they need the extra `network`, which settings do without
    from fedlens.core.wire.message import Message
    from fedlens.engines.links.link import Arrived
    from fedlens.engines.links.post import Post

LOST = "no contact with the site"
_REMEMBERED = 10_000
_TICK = 1.0  # seconds between two looks at who is online

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@declares(EngineTraits())
def network(
    *,
    deadline: Annotated[Seconds, Field(description="seconds after which an answer is late")] = 3600.0,
    min_sites: Annotated[int, Field(ge=1, description="sites that a round needs")] = 2,
    patience: Annotated[
        Seconds,
        Field(description="seconds to wait for that many sites before the run stops; it can be resumed"),
    ] = 86400.0,
    enough: Annotated[
        float,
        Field(gt=0, le=1, description="share of replies after which an exchange waits for `grace` alone"),
    ] = 1.0,
    grace: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="seconds that are left to the others then")
    ] = 60.0,
    lost: Annotated[
        Seconds, Field(description="seconds without a sign of a site after which it has failed")
    ] = 60.0,
    max_message: Annotated[int, Field(ge=1, description="MiB of the largest answer")] = 4096,
    max_share: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="largest share of one site in all examples, and in the weights of each round's updates; in a "
            "secure sum, whose weights are hidden, in the examples of its clients",
        ),
    ] = 0.5,
    threads: Threads = 1,
    device: Device = "auto",
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = "auto",
) -> NetworkEngine:
    """The sites of a federation. `threads`, `device` and the others after it are for evaluations at the server."""
    waits = Waits(deadline, min_sites, patience, enough, grace, lost)
    computing = Computing(resolved(device), precision, channels_last)
    return NetworkEngine(waits, max_message * 2**20, max_share, threads, computing)


@dataclass(frozen=True)
class Waits:
    """How long the server waits, and for whom; see `network`."""

    deadline: float = 3600.0
    min_sites: int = 2
    patience: float = 86400.0
    enough: float = 1.0
    grace: float = 60.0
    lost: float = 60.0


@dataclass(eq=False)
class _Open:
    """A request that is out, and what came back."""

    request: Request
    id: Id
    site: str
    message: Message
    expect: Schema
    arrived: Arrived | None = None
    failed: str | None = None
    logged: bool = False

    @property
    def settled(self) -> bool:
        return self.arrived is not None or self.failed is not None


@dataclass(eq=False)
class _Exchange:
    """The requests of one ask to sites, and until when they count."""

    requests: dict[int, _Open]  # by slot
    due: float

    def close(self, reason: str, sites: Collection[str] | None = None) -> None:
        """What has not come back, from these sites or all, has failed."""
        for each in self.requests.values():
            if not each.settled and (sites is None or each.site in sites):
                each.failed = reason

    def shorten(self, now: float, enough: float, grace: float) -> None:
        """Leaves `grace` seconds to the others once `enough` of the clients have replied."""
        replied = sum(
            each.arrived is not None and each.arrived.message.details.get("outcome") == "reply"
            for each in self.requests.values()
        )
        if enough < 1 and replied >= enough * len(self.requests):
            self.due = min(self.due, now + grace)


@dataclass(frozen=True)
class _ServerData(ClientDataSource):
    """The data at the server. Nothing is known of a client but that it exists."""

    source: ClientDataSource
    clients: int

    def data_of(self, client: ClientId, /) -> Any:
        """The server's data; None for a client. Raises `KeyError` for an unknown one."""
        if not is_client(client):
            return self.source.data_of(client)
        if client not in range(self.clients):
            raise KeyError(client)
        return None

    def on(self, device: torch.device, /) -> ClientDataSource:
        """The same with the server's data on `device`."""
        return replace(self, source=self.source.on(device))


class NetworkEngine(EngineBase):
    """See `network`. `attach` it to the sites before a run.

    Asks for data at the server, and those of "@server", run in this process. All others go out at once. Bodies of
    answers wait in files and are read one at a time, in the order of the slots: the sums are those of `inline`.

    Attributes:
        dropped: how many answers were not used, by kind: "late", "again", or "other" for what was never asked.
    """

    states_at_sites = True

    def __init__(
        self,
        waits: Waits | None = None,
        most: int = 2**32,
        max_share: float = 0.5,
        threads: int = 1,
        computing: Computing = ON_CPU,
    ) -> None:
        self.waits, self.most, self.max_share = waits or Waits(), most, max_share
        self.threads, self.computing = threads, computing
        self.dropped = {"late": 0, "again": 0, "other": 0}
        self._post: Post | None = None
        self._options = ExitStack()
        self._before: int | None = None
        self._exchanges: list[_Exchange] = []
        self._by_arrival: list[_Exchange] = []
        self._once: dict[bytes, None] = {}  # digests of asks that were closed last
        self._kept: Mapping[ClientId, Collection[str]] = {}

    def attach(self, post: Post, roster: Roster, clock: Callable[[], float] = time.monotonic) -> None:
        """Connects the engine with the sites, before `check`.

        Args:
            post: sends and receives.
            roster: the clients and their sites.
            clock: gives the seconds that deadlines are compared with.
        """
        self._post, self._roster, self._clock = post, roster, clock
        post.most = self.most
        self._quorum = Quorum(roster, self.waits.min_sites, self.max_share)

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` without sites, with too few of them, or if one has too large a share of the examples."""
        self.computing.check()
        self._attached()
        sites, sizes = self._roster.sites, self._roster.sizes()
        if len(set(sites)) < self.waits.min_sites:
            raise ConfigError(
                f"the federation has {len(set(sites))} sites, and a round needs {self.waits.min_sites}",
                where="engine.min_sites",
                hint="invite more sites, or lower it",
            )
        for site in sorted(set(sites)):
            share = float(sizes[self._roster.rows_of(site)].sum() / sizes.sum())
            if share > self.max_share:
                raise ConfigError(
                    f"the site '{site}' has {share:.0%} of all examples, more than {self.max_share:.0%}: it alone "
                    "would decide what is learned",
                    where="engine.max_share",
                    hint=f"set it to {math.ceil(share * 100) / 100:g} if that is meant",
                )

    def _attached(self) -> Post:
        if self._post is None:
            raise ConfigError(
                "the engine 'network' asks sites, and this command has no connection to any",
                where="engine.name",
                hint="start the experiment with 'fedlens serve', or choose engine.name = 'inline' for a simulation",
            )
        return self._post

    def applied(self, program: Program) -> Program:
        """The program on the device of the server's evaluations."""
        return self.computing.applied(program)

    def open(self, program: Program, states: ClientStates) -> None:
        """Receives the program. Raises `ConfigError` as `check` does."""
        self.check(program.ops)
        self._states = states
        applied = self.applied(replace(program, data=_ServerData(program.data, len(self._roster))))
        self._options.enter_context(applied.computing())
        self._executor = Executor(applied)
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    # -- who is there ---------------------------------------------------------------------------------------------

    def online(self) -> list[int]:
        """The clients whose sites are there; waits up to `patience` for `min_sites` of them.

        Raises `RunFailed` if fewer came; the run can be resumed.
        """
        self._quorum.begin()
        until = self._clock() + self.waits.patience
        while len(here := self._here()) < self.waits.min_sites:
            if self._clock() >= until:
                few = f"{len(here)} of {len(set(self._roster.sites))} sites are there, and a round needs "
                raise RunFailed(
                    f"{few}{self.waits.min_sites}: waited {self.waits.patience:g} s",
                    where="engine.min_sites",
                    hint="start 'fedlens serve' again when they are back, or lower it",
                )
            self._collect(until)
        return [row for row, site in enumerate(self._roster.sites) if site in here]

    def _here(self) -> set[str]:
        seen, known = self._attached().link.online(), set(self._roster.sites)
        return {site for site, ago in seen.items() if ago <= self.waits.lost and site in known}

    def too_few(self, replied: Collection[ClientId], failed: int) -> str | None:
        """See `Quorum.fault`."""
        return self._quorum.fault(replied, failed)

    def keep(self, handles: Mapping[ClientId, Collection[str]]) -> None:
        """Receives the handles that checkpoints name; the next ask to each client carries its own."""
        self._kept = dict(handles)

    # -- asks -----------------------------------------------------------------------------------------------------

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask; see `NetworkEngine`."""
        if ask.logged:
            ask = _without_logs(ask)
        ids = [Id(round, exchange, slot) for slot in range(len(ask.requests))]
        if ask.order == "request":
            return self._answers(ask, ids)
        self._by_arrival.append(self._sent(ask, ids))
        return self._arriving(ask, ids)

    def _sent(self, ask: Ask, ids: Iterable[Id]) -> _Exchange:
        """Sends the requests to clients."""
        post, seconds = self._attached(), min(ask.deadline or math.inf, self.waits.deadline)
        out = _Exchange({}, self._clock() + seconds)
        shared = None
        for id in ids:
            request = ask.requests[id.slot]
            if not is_client(request.client):
                continue
            shared = shared or post.shared(downloaded(ask.shared))
            row, expect = request.client, self._bounded(ask.expect, request.client)
            message = post.ask(
                self._roster.sites[row],
                self._roster.ids[row],
                id,
                ask.op,
                downloaded(request.payload),
                shared,
                expect,
                state=self._states.get(row).get(AT_SITE),
                keep=self._kept.get(row, ()),
                seconds=seconds,
            )
            out.requests[id.slot] = _Open(request, id, self._roster.sites[row], message, expect)
        self._exchanges.append(out)
        return out

    def _bounded(self, expect: Schema, row: int) -> Schema:
        """The schema with the client's own size in place of that of the largest client, as a bound on its weight."""
        weight = (expect.fields or {}).get("weight")
        sizes = self._roster.sizes()
        if not isinstance(weight, NumberField) or weight.most != float(sizes.max()):
            return expect
        own = replace(weight, most=float(sizes[row]))
        return replace(expect, fields={**(expect.fields or {}), "weight": own})

    def _answers(self, ask: Ask, ids: list[Id]) -> Generator[Answer, None, None]:
        out = self._sent(ask, ids)
        size = ask.reduce.block if ask.reduce else 1
        try:
            for first in range(0, len(ids), size):
                block = (self._one(ask, id, out) for id in ids[first : first + size])
                yield from block if ask.reduce is None else reduced(block, ask.reduce)
        finally:
            self._end(out)

    def _one(self, ask: Ask, id: Id, out: _Exchange) -> Answer:
        if id.slot not in out.requests:
            return self._at_server(ask, id)
        one = out.requests[id.slot]
        while not one.settled:
            self._collect(out.due)
        return self._read(one)

    def _arriving(self, ask: Ask, ids: list[Id]) -> Generator[Answer, None, None]:
        for id in ids:
            if not is_client(ask.requests[id.slot].client):
                yield self._at_server(ask, id)
        while self._by_arrival:
            for out in list(self._by_arrival):
                for slot in [slot for slot, one in out.requests.items() if one.settled]:
                    one = out.requests.pop(slot)
                    self._remember(one.message.digest)
                    yield self._read(one)
                if not out.requests:
                    self._by_arrival.remove(out)
                    self._end(out)
            if self._by_arrival:
                self._collect(min(out.due for out in self._by_arrival))

    def _end(self, out: _Exchange) -> None:
        """Answers to these requests are late from here on."""
        if out in self._exchanges:
            self._exchanges.remove(out)
        for one in out.requests.values():
            self._remember(one.message.digest)
            if not one.logged:
                self._note(one, "unused", "the exchange ended")
            if one.arrived is not None:
                one.arrived.file.close()

    def _remember(self, ask: bytes) -> None:
        """Remembers an ask, for the count of late answers: the link keeps later ones out, and a run lasts for weeks."""
        self._once[ask] = None
        if len(self._once) > _REMEMBERED:
            del self._once[next(iter(self._once))]

    def _at_server(self, ask: Ask, id: Id) -> Answer:
        state = self._states.get(ask.requests[id.slot].client)
        with random_state_kept(self._executor.device):
            return self._executor.alone(ask.op, ask.shared, item_of(ask, id, state), ask.expect)

    def _read(self, one: _Open) -> Answer:
        """The answer that came back, checked as if its site had not: one body is in memory."""
        if one.arrived is None:
            self._note(one, "late", one.failed or LATE)
            return Failure(one.id, one.request.client, one.failed or LATE)
        outcome = self._attached().opened(one.message, one.arrived)
        if isinstance(outcome, str):
            replied = one.arrived.message.details.get("outcome") == "reply"
            self._note(one, "refused" if replied else "failed", outcome)
            return Failure(one.id, one.request.client, outcome)
        letters = [(letter.to, letter.content) for letter in outcome.letters]
        sent = answer_fields(outcome.payload, outcome.metrics, letters)
        item = Item(one.id, one.request.client, one.request.payload, {})
        answer = self._quorum.counted(self._executor.checked(item, outcome, one.expect), one.expect)
        if isinstance(answer, Reply):
            answer.donated = frozenset(answer.payload)  # nobody else has this memory
            self._note(one, "taken", None, sent)
        else:
            self._note(one, "refused", answer.reason)
        return answer

    def _note(self, one: _Open, decision: str, reason: str | None, fields: Sequence[str] = ()) -> None:
        one.logged = True
        answer = None if one.arrived is None else one.arrived.message
        self._attached().note(one.site, one.message, answer, decision, reason, fields)

    # -- what arrives ---------------------------------------------------------------------------------------------

    def _collect(self, until: float) -> None:
        """Waits for messages, at most a second or `until`; then settles what is late, lost, or not waited for."""
        waiting = {
            one.message.digest: one
            for out in self._exchanges
            for one in out.requests.values()
            if not one.settled
        }
        seconds = max(0.0, min(_TICK, until - self._clock()))
        for arrived in self._attached().link.collect(seconds, waiting.keys()):
            self._take(arrived, waiting)
        now, here = self._clock(), self._here()
        for out in self._exchanges:
            out.shorten(now, self.waits.enough, self.waits.grace)
            if now >= out.due:
                out.close(LATE)
            out.close(LOST, {one.site for one in out.requests.values()} - here)

    def _take(self, arrived: Arrived, waiting: dict[bytes, _Open]) -> None:
        digest = arrived.message.fields.ask
        one = waiting.get(digest)
        fits = one is not None and arrived.site == one.site
        if one is not None and fits and arrived.message.fault_as_answer_to(one.message) is None:
            del waiting[digest]
            one.arrived = arrived
            return
        arrived.file.close()
        out = any(one.message.digest == digest for out in self._exchanges for one in out.requests.values())
        kind = "other" if one is not None else "again" if out else "late" if digest in self._once else "other"
        self.dropped[kind] += 1

    def close(self) -> None:
        """Ends all requests and closes the link."""
        for out in self._exchanges[:]:
            self._end(out)
        self._by_arrival.clear()
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
            self._options.close()
        if self._post is not None:
            self._post.link.close()


def _without_logs(ask: Ask) -> Ask:
    """The ask without the logs of clients: each site adds those that it keeps, and sends none."""
    requests = [
        replace(request, payload={name: value for name, value in request.payload.items() if name != "log"})
        for request in ask.requests
    ]
    return replace(ask, requests=requests, expect=replace(ask.expect, log=False))


__all__ = ["NetworkEngine", "Waits", "network"]
