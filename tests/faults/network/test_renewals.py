"""Certificates that are renewed or end while a site is connected, and a server that was away."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from fedlens.base.errors import IdentityError
from fedlens.engines.links.https import HttpsLink
from fedlens.identity.authority import DAY
from fedlens.identity.site_keys import SiteKeys
from fedlens.site.connection import SiteRefused, Timing
from tests.link_kit import At, Federation, answer_to, beside, bodies, within
from tests.unit.identity.federation_kit import NOW, at, joined


def joined_before(federation: Federation, days: float) -> SiteKeys:
    """A site that joined so many days ago."""
    keys = joined(at(NOW - days * DAY, federation.registry), "ward-a", federation.folder)
    keys.port = federation.port
    return keys


def test_a_site_renews_its_certificate_and_is_served_beyond_the_end_of_the_old(tmp_path: Path) -> None:
    clock = [NOW]
    federation = Federation(tmp_path, clock=lambda: clock[0])
    with federation.link() as link:
        site, ask = joined_before(federation, days=61), federation.ask()
        before = site.certificate()
        assert site.renewal_due(NOW)

        async def agent() -> bool:
            async with At(site, options={"clock": lambda: clock[0]}) as connection:
                poll = asyncio.create_task(connection.next([]))  # with the old certificate
                await asyncio.sleep(0)
                await connection.renew()
                clock[0] = before.not_after.timestamp() + 1
                link.send("ward-a", ask, {})
                received = await poll or await connection.next([])
                assert received is not None
                return await connection.answer(received[0].digest, answer_to(received[0], site.identity()))

        assert within(agent)
        assert len(bodies(link.collect(60, [ask.digest]))) == 1
    after = site.certificate()
    assert not site.renewal_due(clock[0])
    assert (after.identity, after.name) == (before.identity, before.name)
    assert after.certificate != before.certificate
    assert "ward-a" in {each.name for each in federation.registry.sites() if each.state == "accepted"}


def test_a_certificate_that_ends_while_connected_is_named_by_the_site(tmp_path: Path) -> None:
    clock = [NOW]
    federation = Federation(tmp_path, clock=lambda: clock[0])
    with federation.link() as link:
        site = joined_before(federation, days=89)

        async def agent() -> None:
            async with At(site, options={"clock": lambda: clock[0]}) as connection:
                while True:
                    await connection.next([])

        with pytest.raises((IdentityError, SiteRefused)) as caught, beside(agent):  # noqa: PT012 - it waits beside it
            while "ward-a" not in link.online():
                time.sleep(0.01)
            clock[0] += 2 * DAY
        assert "expired" in caught.value.what
        seen = link.online()["ward-a"]
        time.sleep(0.05)
        assert link.online()["ward-a"] > seen  # it was not heard of again


def test_a_renewal_is_refused_without_the_key_that_lasts(federation: Federation, link: HttpsLink) -> None:
    site, thief = federation.site("ward-a"), federation.site("ward-b")
    (site.folder / "identity.pem").write_bytes((thief.folder / "identity.pem").read_bytes())

    async def agent() -> None:
        async with At(site) as connection:
            await connection.renew()

    with pytest.raises(IdentityError, match="the server does not renew the certificate of this site"):
        within(agent)
    assert [kind for kind, *_ in federation.notices] == ["address", "renewal"]


def test_all_sites_are_back_within_30_s_of_a_server_that_was_away_for_60(federation: Federation) -> None:
    with federation.link():
        sites, asks = (
            [federation.site(f"ward-{k}") for k in "abc"],
            [federation.ask(f"ward-{k}") for k in "abc"],
        )
    back: list[float] = []

    async def agent() -> None:
        await asyncio.gather(*map(wait, sites))

    async def wait(site: SiteKeys) -> None:
        passed, slept = 0.0, asyncio.Event()

        async def sleep(seconds: float) -> None:
            nonlocal passed
            if passed + seconds > 60:
                away.discard(site.name)
                while "server" in away:
                    await asyncio.sleep(0.01)
            passed += seconds
            slept.set()

        options = {"sleep": sleep, "uniform": lambda low, high: high, "timing": Timing()}
        async with At(site, options=options) as connection:
            while (received := await connection.next([])) is None:
                pass
            assert received[0].fields.client == site.name
        assert slept.is_set()
        back.append(passed)

    away = {"server", *(site.name for site in sites)}
    with beside(agent):
        while away != {"server"}:
            time.sleep(0.01)
        with federation.link(federation.port) as link:
            for ask in asks:
                link.send(ask.fields.client, ask, {})
            away.clear()
            while len(back) < 3:
                time.sleep(0.01)
    assert all(60 < seconds <= 90 for seconds in back)
