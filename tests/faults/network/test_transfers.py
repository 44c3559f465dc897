"""Bodies on a bad network, at the limits, and on a full disk: they arrive whole and once, and take no memory."""

from __future__ import annotations

import asyncio
import io
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlens.core.wire.message import MOST_HEAD, PROTOCOL, MessageError
from fedlens.engines.links import uploads
from fedlens.engines.links.https import HttpsLink
from fedlens.engines.links.uploads import Upload
from fedlens.identity.site_keys import client_context
from fedlens.site.connection import Timing
from tests.link_kit import At, Federation, Proxy, answer_to, beside, blobs, bodies, put, request, within
from tests.unit.identity.federation_kit import HOST

MODEL = random.Random(0).randbytes(3_000_000)


def resident(peak: bool = False) -> int:
    """The bytes of memory of this process now, or at most since `reset_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) * 1024


@pytest.mark.parametrize("kind", ["cut", "delay", "flip", "repeat", "stall"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_body_arrives_whole_and_once_over_a_bad_network(
    federation: Federation, link: HttpsLink, way: str, kind: str
) -> None:
    with Proxy(federation.port) as proxy:
        site = federation.site("ward-a")
        site.port = proxy.port
        ask = federation.ask(shared=MODEL)
        link.send("ward-a", ask, blobs(MODEL))
        proxy.faults = [(way, kind, 1_000_000)] * 2

        async def agent() -> bool:
            timing = Timing(quiet=2 if kind == "stall" else 60, first=0.01, longest=0.05)
            async with At(site, options={"timing": timing}) as connection:
                assert await connection.blob(ask.fields.shared, len(MODEL)) == MODEL
                return await connection.answer(ask.digest, answer_to(ask, site.identity(), body=MODEL))

        assert within(agent)
        assert kind in proxy.happened
    [arrived] = link.collect(60, [ask.digest])
    assert arrived.body() == MODEL
    assert link.collect(0, [ask.digest]) == []


def test_a_cut_body_goes_on_where_it_ended(federation: Federation, link: HttpsLink) -> None:
    site, ask = federation.site("ward-a"), federation.ask(shared=MODEL)
    link.send("ward-a", ask, blobs(MODEL))
    data = b"".join(answer_to(ask, site.identity(), body=MODEL))

    async def attacker() -> None:
        context, path = client_context(site.folder), f"/answer/{ask.digest.hex()}"
        headers = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}", "Content-Length": str(len(data))}
        _, writer = await asyncio.open_connection(HOST, federation.port, ssl=context)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(
            f"PUT {path} HTTP/1.1\r\nHost: a\r\nfedlens-protocol: {PROTOCOL}\r\n{lines}\r\n".encode()
            + data[:1_000_000]
        )
        await writer.drain()
        while True:
            _, answer, _ = await request(federation, context, "HEAD", path)
            if answer["fedlens-received"] == "1000000":
                break
        assert await put(federation, site, ask, data[999_999:], 999_999) == (409, "offset")
        assert (await put(federation, site, ask, data[1_000_000:], 1_000_000))[0] == 201
        writer.transport.abort()
        status, answer, body = await request(federation, context, "GET", f"/blob/{ask.fields.shared.hex()}")
        assert status == 404  # the ask is answered
        other = federation.ask(shared=MODEL, slot=1)
        link.send("ward-a", other, {})
        range_from = {"Range": "bytes=2999990-"}
        while status == 404:
            status, _, body = await request(
                federation, context, "GET", f"/blob/{ask.fields.shared.hex()}", range_from
            )
        assert (status, body) == (206, MODEL[-10:])

    within(attacker)
    assert len(bodies(link.collect(60, []))) == 1


def test_what_is_too_large_takes_no_memory(federation: Federation, link: HttpsLink) -> None:
    site, large = federation.site("ward-a"), 2**40
    ask = federation.ask(details={"most": 1000})
    link.send("ward-a", ask, {})
    context, path = client_context(site.folder), f"/answer/{ask.digest.hex()}"

    async def endless() -> object:
        for _ in range(2000):
            yield bytes(2**20)

    async def attacker() -> list[int]:
        statuses = []
        for headers in (
            {"Content-Range": f"bytes 0-{large - 1}/{large}", "Content-Length": str(large)},
            {"Content-Range": "bytes 0-99/100"},  # without a length: chunks without an end
            {"Content-Range": "bytes 0-99/100", "Content-Length": "100", "Content-Encoding": "gzip"},
        ):
            try:
                data = endless() if "Content-Encoding" not in headers else bytes(100)
                statuses.append((await request(federation, context, "PUT", path, headers, data))[0])
            except OSError:
                statuses.append(0)  # closed while it was sent
        status, _, _ = await request(federation, context, "PUT", "/census", data=io.BytesIO(bytes(3_000_000)))
        return [*statuses, status]

    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    assert set(within(attacker)) <= {0, 411, 413}
    assert resident(peak=True) - before < 64 * 2**20
    assert link.collect(0, [ask.digest]) == []

    async def agent() -> None:
        async with At(site, most=1000) as connection:
            await connection.blob(bytes(32), 2**30)

    with pytest.raises(MessageError, match="at most 1,000 are accepted"):
        within(agent)


@pytest.mark.parametrize("cut", [1, uploads._IN_MEMORY, uploads._IN_MEMORY + 1, -65, -1])
def test_an_answer_that_was_cut_at_a_limit_goes_on(federation: Federation, link: HttpsLink, cut: int) -> None:
    site, ask = federation.site("ward-a"), federation.ask(details={"most": len(MODEL)})
    link.send("ward-a", ask, {})
    data = b"".join(answer_to(ask, site.identity(), body=MODEL))
    first, whole = data[:cut], len(data)
    assert whole > len(MODEL)

    async def agent() -> bool:
        context, path = client_context(site.folder), f"/answer/{ask.digest.hex()}"
        lines = f"Content-Range: bytes 0-{whole - 1}/{whole}\r\nContent-Length: {whole}\r\n"
        _, writer = await asyncio.open_connection(HOST, federation.port, ssl=context)
        writer.write(
            f"PUT {path} HTTP/1.1\r\nHost: a\r\nfedlens-protocol: {PROTOCOL}\r\n{lines}\r\n".encode() + first
        )
        await writer.drain()
        received = "0"
        while int(received) < len(first):
            received = (await request(federation, context, "HEAD", path))[1].get("fedlens-received", "0")
        writer.transport.abort()
        async with At(site) as connection:
            return await connection.answer(ask.digest, [data])

    assert within(agent)
    assert bodies(link.collect(60, [ask.digest])) == [MODEL]
    assert link.refused.total() == 0


def test_an_answer_that_is_one_byte_too_long_is_refused_unread(
    federation: Federation, link: HttpsLink
) -> None:
    site, ask = federation.site("ward-a"), federation.ask(details={"most": 1000})
    link.send("ward-a", ask, {})
    most = 1000 + MOST_HEAD
    for length, status in ((most + 1, 413), (most, 422)):  # the second one is read, and is no message
        assert within(lambda length=length: put(federation, site, ask, bytes(length)))[0] == status
    kept = answer_to(ask, site.identity(), body=bytes(1000))

    async def agent() -> bool:
        async with At(site) as connection:
            return await connection.answer(ask.digest, kept)

    assert within(agent)
    assert bodies(link.collect(60, [ask.digest])) == [bytes(1000)]


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow beyond 1 MB: the kernel refuses it as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("piece", [1000, 100_000])
def test_what_a_full_disk_refused_can_be_dropped(tmp_path: Path, piece: int) -> None:
    upload = Upload(tmp_path, 2**30)
    upload.begin(None, 0, 2_000_000)
    with full_disk(), pytest.raises(OSError, match="File too large"):  # noqa: PT012 - which write fails is the kernel's
        for _ in range(2_000_000 // piece):
            upload.write(None, bytes(piece))
        upload.file.flush()
    with full_disk():
        upload.close()
    assert upload.file.closed


@pytest.mark.parametrize(
    "size", [1_000_000, 3_000_000]
)  # it fails when it is flushed, and while it is written
def test_a_full_disk_at_the_server_delays_an_answer_and_harms_no_other(
    federation: Federation, link: HttpsLink, size: int
) -> None:
    large, small = federation.site("ward-a"), federation.site("ward-b")
    asks = [federation.ask(name) for name in ("ward-a", "ward-b")]
    for name, ask in zip(("ward-a", "ward-b"), asks, strict=True):
        link.send(name, ask, {})
    told = At(large)

    async def agent() -> bool:
        async with told as connection:
            body = MODEL[:size]
            return await connection.answer(asks[0].digest, answer_to(asks[0], large.identity(), body=body))

    with beside(agent), full_disk():
        while len(told.troubles) < 2:
            assert link.collect(0.05, [ask.digest for ask in asks]) == []
        within(lambda: put(federation, small, asks[1], b"".join(answer_to(asks[1], small.identity()))))
        assert len(bodies(link.collect(60, [ask.digest for ask in asks]))) == 1
    assert bodies(link.collect(60, [asks[0].digest])) == [MODEL[:size]]
    assert set(told.troubles) == {"the server answers 507"}
    assert ("disk", "ward-a") in {(kind, name) for kind, name, _ in federation.notices}
    assert list(federation.spool.iterdir()) == []
