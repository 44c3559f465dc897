"""What the log of a server says in time."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import pytest

from fedlens.engines.network import NetworkEngine
from fedlens.files import jsonl
from fedlens.identity.authority import certificates, der
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.tls import FederationContext
from fedlens.run.rundir import RunDir
from fedlens.server.event_log import DAY, EventLog
from fedlens.server.progress import SiteRow
from fedlens.server.retention import ServedRuns
from fedlens.server.watch import HOUR, Watch
from tests.link_kit import Federation
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, at

Usage = namedtuple("Usage", "free")


class Sites:
    """The sites of a run that goes on."""

    round, largest = 7, 1000

    def __init__(self) -> None:
        self.failures = Counter({("ward-a", "memory"): 2})
        self.shown = [SiteRow("ward-a", "online", 3.0, 1), SiteRow("ward-b", "refused", None, 0, "contract")]

    def rows(self, lost: float) -> list[SiteRow]:
        return self.shown


class Link:
    """A link that refused a message."""

    def __init__(self) -> None:
        self.refused = Counter({("ward-b", "signature"): 1})
        self.used: list[Path] = []

    def use(self, chain: Path, passphrase: bytes | None) -> None:
        self.used.append(chain)


class Watched:
    def __init__(self, folder: Path) -> None:
        self.now = NOW
        self.federation = Federation(folder)
        self.federation.site("ward-a")
        self.registry = FederationFolder(self.federation.folder / "hospitals", clock=lambda: self.now)
        self.path = folder / "serve.log.jsonl"
        log = EventLog(self.path, lambda: self.now)
        self.link, self.shown = Link(), list[Any]()
        self.watch = Watch(
            self.registry, self.link, None, folder, log, self.shown.append, lambda: self.now  # type: ignore[arg-type]
        )  # fmt: skip
        self.sites = Sites()
        self.watch.follow(self.sites, NetworkEngine())  # type: ignore[arg-type]

    def after(self, seconds: float) -> list[dict[str, Any]]:
        """The new lines after a look so many seconds later."""
        self.now += seconds
        before = len(jsonl.read(self.path))
        self.watch.look()
        return jsonl.read(self.path)[before:]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_line_a_minute_says_who_is_there(watched: Watched) -> None:
    (line,) = watched.after(0)
    assert line["event"] == "status"
    assert (line["round"], line["online"], line["refused"]) == (7, ["ward-a"], ["ward-b"])
    assert line["answers_failed"] == {"ward-a: memory": 2}
    assert line["messages_refused"] == {"ward-b: signature": 1}
    assert line["answers_dropped"] == {"late": 0, "again": 0, "other": 0}
    assert not watched.after(30)
    assert [line["event"] for line in watched.after(31)] == ["status"]
    assert len(watched.shown) == 3


def test_a_day_of_silence_is_said_once_a_day(watched: Watched) -> None:
    watched.after(0)
    watched.sites.shown = [SiteRow("ward-a", "late", DAY + 1, 1)]
    silent = [line for line in watched.after(60) if line["event"] == "silent"]
    assert [line["site"] for line in silent] == ["ward-a"]
    assert not [line for line in watched.after(60) if line["event"] == "silent"]
    assert [line for line in watched.after(DAY) if line["event"] == "silent"]
    watched.sites.shown = [SiteRow("ward-a", "late", DAY + 1, 1, "left on 2026-11-28 13:59 UTC")]
    assert not [line for line in watched.after(DAY) if line["event"] == "silent"]


def test_runs_that_are_due_are_purged_while_another_one_is_served(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, purged = ServedRuns(watched.registry.folder), list[Path]()
    for name in ("old", "new", "."):
        (run := watched.path.parent / name).mkdir(exist_ok=True)
        RunDir(run).serve_log_path.touch()
        os.utime(RunDir(run).serve_log_path, (0, NOW))
        runs.add(run)
    os.utime(RunDir(watched.path.parent / "new").serve_log_path, (0, NOW + 300 * DAY))
    monkeypatch.setattr("fedlens.server.watch.purge", lambda run: purged.append(run.path))
    assert not [line for line in watched.after(364 * DAY) if line["event"] == "purged"]
    assert [line for line in watched.after(2 * DAY) if line["event"] == "purged"]
    assert purged == [(watched.path.parent / "old").resolve()]


def test_systemd_knows_the_round_and_no_name_of_a_site(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name := str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        watched.after(0)
        assert systemd.recv(1000) == b"STATUS=round 7; sites: 1 online, 1 refused"


def test_a_disk_without_room_for_two_bodies_is_said(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1999))
    assert "1,999 bytes are free" in next(
        line["what"] for line in watched.after(0) if line["event"] == "disk"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2000))
    assert not [line for line in watched.after(2 * DAY) if line["event"] == "disk"]


def test_certificates_that_end_are_said_and_that_of_the_server_is_renewed(watched: Watched) -> None:
    watched.after(0)
    before = (watched.registry.folder / "server.pem").read_bytes()
    events = {line["event"] for line in watched.after(61 * DAY)}
    assert "renewed" in events
    assert "certificate" not in events
    assert watched.link.used == [watched.registry.folder / "server.pem"]
    assert (watched.registry.folder / "server.pem").read_bytes() != before
    (warned,) = [line for line in watched.after(16 * DAY) if line["event"] == "certificate"]
    assert (warned["site"], warned["what"]) == ("ward-a", "its certificate ends in 13 days")
    watched.registry.revoke("ward-a")
    assert not [line for line in watched.after(2 * DAY) if line["event"] == "certificate"]
    (issuer,) = [line for line in watched.after(600 * DAY) if line["event"] == "issuer"]
    assert "rotate" in issuer["what"]


def test_a_renewed_certificate_is_used_by_a_link_that_listens(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    chain = federation.registry.folder / "server.pem"
    client = FederationContext.trusting(federation.registry.root, ssl.PROTOCOL_TLS_CLIENT)

    def shown(port: int) -> bytes | None:
        with (
            socket.create_connection((HOST, port), timeout=60) as raw,
            client.wrap_socket(raw, server_hostname=HOST) as end,
        ):
            return end.getpeercert(binary_form=True)

    with federation.link() as link:
        before = shown(federation.port)
        assert at(NOW + 61 * DAY, federation.registry).renew_server()
        assert shown(federation.port) == before
        link.use(chain, None)
        assert not link.keeps("ward-a", bytes(32))  # the link has done what it was told before
        # It is valid from an hour before it was made, which is to come here.
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        assert shown(federation.port) == der(certificates(chain)[0]) != before


def test_rotated_keys_want_a_new_start(watched: Watched) -> None:
    watched.after(0)
    watched.registry.rotate(ROOT)
    (line,) = [line for line in watched.after(HOUR) if line["event"] == "rotated"]
    assert "start 'fedlens serve' again" in line["what"]


def test_a_log_that_cannot_be_written_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(tmp_path / "nowhere" / "serve.log.jsonl").write("status", round=1)
    EventLog(None).notice("address", "ward-a", "it calls from 10.0.0.1")
    first, second = capsys.readouterr().err.splitlines()
    assert '"round": 1' in first
    assert '"site": "ward-a"' in second


def test_only_its_owner_can_read_the_log(watched: Watched) -> None:
    watched.after(0)
    assert watched.path.stat().st_mode & 0o777 == 0o600
