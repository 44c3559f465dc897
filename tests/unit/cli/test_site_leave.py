"""`fedlens site leave` stops the site in any case, and tells the server if it listens and the keys can be read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fedlens.engines.links.https import HttpsLink
from fedlens.files.chained_log import read_chained
from fedlens.identity.authority import HOUR
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.keys import KeyPair
from fedlens.identity.plain_message import write_message
from fedlens.identity.signing import sign
from fedlens.identity.site_keys import SiteKeys, client_context
from fedlens.site.answers_log import NAME
from fedlens.site.site_log import OFF
from tests.link_kit import Federation, request, within
from tests.unit.cli.commands import ran, refused
from tests.unit.cli.test_site_experiments import propose, tell, text
from tests.unit.identity.federation_kit import HOST, NOW
from tests.unit.site.site_kit import write_site

Server = tuple[FederationFolder, HttpsLink]
FOLDER = Path("fedlens-site")
PASSPHRASE = b"a long secret"


def join(registry: FederationFolder, passphrase: bytes | None = None) -> SiteKeys:
    """An accepted site in `FOLDER`."""
    FOLDER.mkdir(mode=0o700)
    keys = SiteKeys.join(FOLDER / "keys", invitation := registry.invite("ward-a"), passphrase)
    keys.install(registry.enrol(keys.enrolment(invitation), HOST), NOW)
    registry.accept("ward-a", keys.identity().fingerprint)
    write_site(FOLDER)
    return keys


def told() -> list[dict[str, Any]]:
    """The lines on leaving in the log of the site, without times."""
    lines = [line for line, _, _ in read_chained(FOLDER / "log" / NAME)]
    kinds = ("left", "told", "returned")
    return [{k: v for k, v in line.items() if k != "time"} for line in lines if line["kind"] in kinds]


def left(registry: FederationFolder) -> float:
    """When the server heard that the site has left; 0 if it takes part."""
    (site,) = json.loads(ran("federation", "list", registry.folder, "--json"))["sites"]
    assert site["state"] == "accepted"
    assert ("accepted, left on 20" in ran("federation", "list", registry.folder)) == (site["left"] > 0)
    return float(site["left"])


def test_the_server_knows_until_the_site_works_again(server: Server, text: str) -> None:
    registry, _ = server
    join(registry)
    assert left(registry) == 0
    said = ran("site", "leave")
    assert said.startswith(
        "ward-a has left hospitals: no process computes here, and 'fedlens site start' is refused\n"
        "the server knows\n"
        "The operator deletes what the server has: fedlens federation withdraw hospitals ward-c\n".replace(
            "-c", "-a"
        )
    )
    assert "Still to do here: 'fedlens site purge RUN', the service" in said
    elsewhere = ran("site", "leave", "--folder", FOLDER.absolute())
    assert f"Still to do here: 'fedlens site purge RUN --folder {FOLDER.absolute()}', the" in elsewhere
    first = left(registry)
    assert first > 0
    propose(server, text)
    ran("site", "check", "--network")
    assert ran("site", "review").startswith("this site left the federation on")  # looks, and asks for no work
    again = ran("site", "leave")
    assert again.startswith("ward-a has left hospitals already, on 20")
    assert "\nthe server knows\n" in again
    assert left(registry) == first
    knows = {"kind": "told", "server_knows": True}
    assert told() == [{"kind": "left"}, knows] * 3
    ran("site", "leave", "--undo")
    assert left(registry) == first
    tell(server, "goodbye", {"outcome": "finished", "run": "run"})
    ran("site", "start", "--once")
    assert left(registry) == 0


def test_a_server_that_does_not_listen_is_a_sentence_and_the_site_has_left(
    federation: FederationFolder, unused: int
) -> None:
    keys = join(federation)
    about = json.loads((keys.folder / "site.json").read_text())
    (keys.folder / "site.json").write_text(json.dumps({**about, "port": unused}))
    why = rf"{HOST}:{unused} refuses connections: {OFF}"
    assert (
        said := re.search(
            rf"\nthe server was not told \(({why})\): call the operator\n", ran("site", "leave")
        )
    )
    assert told() == [{"kind": "left"}, {"kind": "told", "server_knows": False, "reason": said[1]}]
    assert "this site left the federation on" in refused("site", "start")
    federation.revoke("ward-a")


@pytest.fixture
def unused(here: Path) -> int:
    """A port at which nothing listens."""
    with (kit := Federation(here / "other")).link():
        pass
    return kit.port


CASES = (
    (["--offline"], b"", "--offline"),
    ([], b"", "there is no terminal to ask for the passphrase"),
    (["--passphrase-file", "pw"], b"", "the passphrase of the keys in fedlens-site/keys is empty"),
    (["--passphrase-file", "pw"], b"another one", "the passphrase is wrong"),
)


def test_encrypted_keys_need_their_passphrase_to_tell_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_terminal(path: Any, *more: Any, **named: Any) -> int:
        if str(path) == "/dev/tty":
            raise OSError
        return opened(path, *more, **named)

    opened, secret = os.open, Path("pw")
    monkeypatch.setattr("os.open", without_terminal)
    join(server[0], PASSPHRASE)
    for options, content, why in CASES:
        secret.write_bytes(content)
        said = ran("site", "leave", *options)
        assert "\nthe server was not told (" in said
        assert why in said
        assert (FOLDER / "left").exists()
        assert left(server[0]) == 0
    secret.write_bytes(PASSPHRASE)
    assert "\nthe server knows\n" in ran("site", "leave", "--passphrase-file", secret)
    assert left(server[0]) > 0


def test_options_of_leaving_exclude_one_another(server: Server) -> None:
    join(server[0])
    assert "exclude one another" in refused("site", "leave", "--undo", "--offline")
    assert not (FOLDER / "left").exists()


def notice(root: bytes, name: str, key: KeyPair, time: float, purpose: str = "left") -> bytes:
    fields: list[str | int | bytes] = [hashlib.sha256(root).digest(), name, int(time)]
    return write_message({"time": int(time), "signature": sign(key, purpose, fields)})


HOSTILE: dict[str, Callable[[FederationFolder, KeyPair, KeyPair], bytes]] = {
    "of another site": lambda r, own, other: notice(r.root, "ward-b", other, NOW),
    "by another site": lambda r, own, other: notice(r.root, "ward-a", other, NOW),
    "in another name": lambda r, own, other: notice(r.root, "ward-b", own, NOW),
    "of another federation": lambda r, own, other: notice(b"root", "ward-a", own, NOW),
    "for another purpose": lambda r, own, other: notice(r.root, "ward-a", own, NOW, "tls-key"),
    "that is old": lambda r, own, other: notice(r.root, "ward-a", own, NOW - HOUR - 1),
    "of the future": lambda r, own, other: notice(r.root, "ward-a", own, NOW + 2 * HOUR),
    "that is none": lambda r, own, other: b"{}",
    "with a huge time": lambda r, own, other: write_message({"time": 10**400, "signature": b""}),
}


def test_a_site_says_only_of_itself_that_it_has_left(tmp_path: Path) -> None:
    kit = Federation(tmp_path)
    with kit.link():
        keys, other = kit.site("ward-a"), kit.site("ward-b")
        own = keys.identity(), other.identity()
        sent = {name: make(kit.registry, *own) for name, make in HOSTILE.items()}
        for name, content in sent.items():
            status, headers, _ = within(
                lambda content=content: request(
                    kit, client_context(keys.folder), "POST", "/left", data=content
                )  # type: ignore[misc]
            )
            assert (status, headers["fedlens-reason"]) == (403, "left"), name
        assert [site.left for site in kit.registry.sites()] == [0.0, 0.0]
        assert {kind for kind, _, _ in kit.notices} == {"address", "left"}
        kit.registry.revoke("ward-a")
        good = notice(kit.registry.root, "ward-a", own[0], NOW)
        with suppress(
            aiohttp.ServerDisconnectedError
        ):  # a server also ends the connections of a revoked site
            status, headers, _ = within(
                lambda: request(kit, client_context(keys.folder), "POST", "/left", data=good)
            )
            assert (status, headers["fedlens-reason"]) == (403, "revoked")
        assert within(lambda: request(kit, None, "POST", "/left", data=good))[0] == 404
    assert [site.left for site in kit.registry.sites()] == [0.0, 0.0]


__all__ = ["text"]
