"""Measures the link of real sites against bare aiohttp over the same TLS: an empty exchange, and bodies both ways.

    python -m benchmarks.network                    # bodies of 64 MiB
    python -m benchmarks.network --mib 256 --repeats 5
    python -m benchmarks.network memory --mib 256   # the peak at the server and at each of two sites, in bodies
    python -m benchmarks.network secure             # rounds of FedAvg at four sites, with secure sums and without

An exchange is an ask to a site and its answer, from `seal` to `collect`; bare aiohttp is a GET and a PUT. A body down
is `GET /blob`, a body up `PUT /answer`; bare aiohttp holds the body in memory at both ends and checks nothing, while
the link counts, hashes, verifies and writes a file. Both ends are in one process, in two threads. The goals: at most
5 ms more for an exchange, and at most 1.5 times the time of a body. Pairs run in turn, and medians are compared.

Memory is that beyond the model at the server, and beyond an idle connection at a site, each in a process of its own.
The goals: three bodies at a site, and at the server the shared body and the answer that is being read.

A secure round is one of four sites with one client each and 55,210 parameters: keys signed by the sites, shares, masked
training of two steps, signed lists, and what opens the sum. Its bytes are those that a run counts. Rounds with secure
sums and without run in turn; docs/who-may-know-what.md has the figures.

On two cores that others used too: an exchange takes 3.6 ms, 3.0 ms more than bare aiohttp; a body of 64 MiB 0.71 times
its time down and 0.73 times up. In bodies of 128 MiB, a site needs 2.0, the server 1.1 until all have answered, and 3.1
while it reads one: its bytes and its tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import torch
from aiohttp import web

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.core.driver import Tally
from fedlens.core.protocol import ClientStates, Id, Outcome, RoundContext
from fedlens.core.random import Rng, Secrets
from fedlens.core.schema import Schema, TreeField
from fedlens.core.states import Journal
from fedlens.core.wire.message import Caps, read_payload
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.engines.links.https import HttpsLink
from fedlens.engines.links.link import Arrived
from fedlens.engines.links.post import Post, answer_body
from fedlens.identity.authority import server_context
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.run.build import build
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from fedlens.site.client_identity import client_identity
from tests.agent_kit import DIGEST, SitesOverTls
from tests.link_kit import At, Federation, answer_to, blobs
from tests.seam.test_sites_over_tls import over
from tests.unit.engines.test_network import roster_of

_MANY = 10_000  # rounds


class Bare:
    """An aiohttp server in a thread, with the same certificates, and a client session for it."""

    def __init__(self, federation: Federation, body: bytes) -> None:
        self.loop, self.body, self.port = asyncio.new_event_loop(), body, 0
        self.stop, started = asyncio.Event(), threading.Event()

        async def get(request: web.Request) -> web.Response:
            return web.Response(body=self.body if request.path == "/body" else b"ask")

        async def put(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(status=201)

        async def serve() -> None:
            app = web.Application(client_max_size=2**40)
            app.add_routes([web.get("/{name}", get), web.put("/{name}", put)])
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(federation.registry.folder))
            await site.start()
            self.port = runner.addresses[0][1]
            started.set()
            await self.stop.wait()
            await runner.cleanup()

        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(serve(),))
        self.thread.start()
        started.wait()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()


async def seconds(task: Callable[[], Awaitable[object]]) -> float:
    """How long a task takes."""
    begun = time.perf_counter()
    await task()
    return time.perf_counter() - begun


async def compare(federation: Federation, link: HttpsLink, site: SiteKeys, body: bytes, repeats: int) -> None:
    """Prints a row for each kind of exchange."""
    bare, numbers, key = Bare(federation, body), iter(range(10**9)), site.identity()
    url, connector = f"https://127.0.0.1:{bare.port}", aiohttp.TCPConnector(ssl=client_context(site.folder))
    pairs: dict[str, tuple[list[float], list[float]]] = {
        "exchange": ([], []),
        "down": ([], []),
        "up": ([], []),
    }
    async with aiohttp.ClientSession(connector=connector) as session, At(site) as connection:

        async def get(path: str) -> None:
            async with session.get(url + path) as response:
                await response.read()

        async def put(data: bytes) -> None:
            async with session.put(f"{url}/answer", data=io.BytesIO(data)) as response:
                await response.read()

        async def bare_exchange() -> None:
            await get("/ask")
            await put(b"answer")

        async def exchange() -> None:
            link.send(site.name, federation.ask(slot=next(numbers)), {})
            received = await connection.next([])
            assert received is not None
            assert await connection.answer(received[0].digest, answer_to(received[0], key))
            [arrived] = link.collect(60, [])
            arrived.body()

        for _ in range(repeats):
            for _ in range(20):
                pairs["exchange"][0].append(await seconds(bare_exchange))
                pairs["exchange"][1].append(await seconds(exchange))
            ask = federation.ask(shared=body, slot=next(numbers))
            link.send(site.name, ask, blobs(body))
            down = partial(connection.blob, ask.fields.shared, len(body))
            up = partial(connection.answer, ask.digest, answer_to(ask, key, body=body))
            pairs["down"][0].append(await seconds(partial(get, "/body")))
            pairs["down"][1].append(await seconds(down))
            pairs["up"][0].append(await seconds(partial(put, body)))
            pairs["up"][1].append(await seconds(up))
            [arrived] = link.collect(60, [])
            arrived.file.close()
    bare.close()
    for name, (plain, ours) in pairs.items():
        a, b = statistics.median(plain) * 1000, statistics.median(ours) * 1000
        print(f"{name:10} bare {a:8.2f} ms   link {b:8.2f} ms   {b / a:5.2f} times   {b - a:+8.2f} ms")


def resident(peak: bool = False) -> int:
    """The bytes of memory of this process, now or at most since `from_here`."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) * 1024


def from_here() -> int:
    """Begins a new peak, and returns the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def light_site(folder: Path, port: int) -> None:
    """Answers one ask with what it shared, and prints its peak in bodies."""

    async def answer() -> None:
        keys = SiteKeys(folder)
        keys.port, key = port, keys.identity()
        async with At(keys) as connection:
            await connection.experiment()
            before = from_here()
            while (received := await connection.next([])) is None:
                pass
            ask, size = received[0], received[0].details["shared_size"]
            shared = read_payload(await connection.blob(ask.fields.shared, size), Caps(2**40))
            body = answer_body({"model": shared["model"]})
            del shared
            await connection.answer(ask.digest, answer_to(ask, key, body=body, details={"metrics": {}}))
            print(f"{folder.name:10} {(resident(peak=True) - before) / size:5.2f} bodies")

    asyncio.run(answer())


def memory(federation: Federation, link: HttpsLink, mib: int) -> None:
    """Prints the peaks of an exchange with two sites."""
    extents = (mib * 2**18,)
    model = {"model": {"weight": torch.ones(extents)}}
    expect = Schema({"model": TreeField({"weight": (extents, torch.float32)})})
    start = multiprocessing.get_context("spawn").Process
    sites = [federation.site(name) for name in ("ward-a", "ward-b")]
    processes = [start(target=light_site, args=(site.folder, site.port)) for site in sites]
    for process in processes:
        process.start()
    while len(link.online()) < len(sites):
        time.sleep(0.05)
    before, post = from_here(), Post(link, federation.key, federation.root, "run", 1)
    shared = post.shared(model)
    asks = [
        post.ask(
            site.name,
            site.name,
            Id(1, 0, slot),
            "train",
            {},
            shared,
            expect,
            state=None,
            keep=(),
            seconds=600,
        )
        for slot, site in enumerate(sites)
    ]
    open_asks, arrived = {ask.digest: ask for ask in asks}, list[Arrived]()
    while len(arrived) < len(asks):
        arrived += link.collect(1, open_asks.keys())
    waiting = resident(peak=True) - before
    for each in arrived:
        outcome = post.opened(open_asks[each.message.fields.ask], each)
        assert isinstance(outcome, Outcome), outcome
        del outcome
    for process in processes:
        process.join()
    until, most = (each / len(shared[0]) for each in (waiting, resident(peak=True) - before))
    print(f"server     {until:5.2f} bodies until all have answered, {most:5.2f} at most")


@contextmanager
def four_sites(folder: Path, aggregate: str) -> Iterator[Callable[[], tuple[float, int, int]]]:
    """Runs one round of FedAvg at four sites over TLS: the seconds that it takes, and the bytes up and down."""
    settings = {
        "rounds": _MANY, "algorithm": "fedavg", "aggregate": aggregate, "model": "mlp",
        "local": {"lr": 0.01, "steps": 2, "batch_size": 8},
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
        "engine": {"name": "inline", "device": "cpu"},
    }  # fmt: skip
    made = build(plan_of(Source(settings)), Path(), download=False)
    parts = replace(made.algorithm.parts, rounds=_MANY)
    parts = replace(parts, federation=replace(parts.federation, contract=DIGEST))
    algorithm, secrets = ALGORITHMS.find("fedavg")(parts), dict[object, Secrets]()
    program = replace(made.program, ops=algorithm.ops, secrets=secrets.__getitem__)
    sites = SitesOverTls(folder, program, roster_of(made), algorithm.takes)
    keys = {name: sites.keys[name].identity() for name in sites.names}
    terms = ExperimentTerms(peers={name: key.public for name, key in keys.items()})
    for row, name in enumerate(sites.names):
        identity = client_identity(keys[name], name, terms, {row}, torch.arange(4), 3)
        secrets[row] = Secrets(identity=identity)
    with sites.serving() as (link, post), sites.working():
        sites.gather(link)
        with over(made, sites, post, ClientStates()) as driver:
            driver.journal = Journal("run")
            state, numbers = algorithm.init(made.model, made.federation), iter(range(1, _MANY))

            def round() -> tuple[float, int, int]:
                nonlocal state
                number, begun = next(numbers), time.perf_counter()
                driver.tally = Tally()
                context = RoundContext(
                    number, _MANY, made.federation, Rng((0, "round", number)), journal=driver.journal
                )
                state = driver.drive(algorithm.round(state, context), number)
                driver.journal.saved(number)
                assert not driver.tally.failures, sites.lines
                return time.perf_counter() - begun, driver.tally.bytes_up, driver.tally.bytes_down

            yield round
            sites.goodbye(link)


def secure(folder: Path, rounds: int) -> None:
    """Prints the median round of plain averaging and of secure sums, which take turns."""
    costs: dict[str, list[tuple[float, int, int]]] = {"mean": [], "secagg": []}
    with ExitStack() as held:
        sides = {name: held.enter_context(four_sites(folder / name, name)) for name in costs}
        for number in range(rounds + 1):
            for name, round in sides.items():
                cost = round()
                costs[name] += [cost] if number else []  # the first opens connections
    for name, each in costs.items():
        seconds, up, down = (statistics.median(column) for column in zip(*each, strict=True))
        print(
            f"{name:10} {seconds * 1000:8.1f} ms a round   {up / 1e6:6.3f} MB up   {down / 1e6:6.3f} MB down"
        )
    ratio = statistics.median(s[0] / p[0] for p, s in zip(*costs.values(), strict=True))
    print(f"secagg takes {ratio:.2f} times the seconds, the median of {rounds} pairs")


def main() -> None:
    """Prints the time of bare aiohttp, that of the link, and their ratio; or the memory of both ends."""
    parser = argparse.ArgumentParser(description="The link of real sites against bare aiohttp.")
    parser.add_argument("what", nargs="?", choices=("time", "memory", "secure"), default="time")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rounds", type=int, default=15, help="of secure: at most 19, which the sites have approved"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "secure":
            secure(Path(folder), asked.rounds)
            return
        federation = Federation(Path(folder))
        with federation.link() as link:
            if asked.what == "memory":
                memory(federation, link, asked.mib)
                return
            site = federation.site("ward-a")
            asyncio.run(compare(federation, link, site, bytes(asked.mib * 2**20), asked.repeats))


if __name__ == "__main__":
    main()
