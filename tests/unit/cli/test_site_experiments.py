"""`fedlens site check` and `review`: what is wrong with the data, and which experiment is approved."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.cli.main import app
from fedlens.core.wire.message import seal, write_payload
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.engines.links.https import HttpsLink
from fedlens.identity.authority import day
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.private_files import one_writer, write_private
from fedlens.identity.signing import SignedFields
from fedlens.identity.site_keys import SiteKeys
from fedlens.site import proposed_experiment
from fedlens.site.agent import Agent
from fedlens.site.approvals import reviewer_number
from fedlens.site.contract import site_part
from fedlens.site.leave import come_back
from fedlens.site.leave import leave as leave_folder
from fedlens.site.log_export import AskedLog
from fedlens.site.settings import SITE_FILE
from fedlens.site.site_log import CONTACT, OFF, TROUBLE, SiteLog
from fedlens.site.start import agent_of
from tests.link_kit import blobs
from tests.unit.cli.commands import ran, refused, runner
from tests.unit.identity.federation_kit import HOST, NOW
from tests.unit.site.site_kit import plan_at_server, write_images, write_site

Server = tuple[FederationFolder, HttpsLink]
FOLDER = Path("fedlens-site")
SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2},
    "data": {"dataset": {"name": "sites", "classes": ["no", "yes"], "input_shape": [1, 8, 8]}},
    "evaluation": {"clients": "all"},
}


@pytest.fixture
def text() -> str:
    """An experiment as the server sends it."""
    return site_part(plan_at_server(SETTINGS).config)


@pytest.fixture
def site(server: Server) -> SiteKeys:
    """An accepted site with eight images."""
    FOLDER.mkdir(mode=0o700)
    keys = SiteKeys.join(FOLDER / "keys", invitation := server[0].invite("ward-a"))
    keys.install(server[0].enrol(keys.enrolment(invitation), HOST), NOW)
    server[0].accept("ward-a", keys.identity().fingerprint)
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8)).astype(np.uint8)
    patients = {"patient": ["p1", "p2"] * 4}
    write_images(FOLDER / "scans", images, ["no", "yes"] * 4, patients)
    write_site(FOLDER)
    return keys


def tell(server: Server, purpose: str, details: dict[str, Any]) -> None:
    """Sends a message to the site."""
    registry, link = server
    root, body = hashlib.sha256(registry.root).digest(), write_payload({})
    fields = SignedFields(root, "run", 1, 0, 0, 0, "", "", "ask", bytes(16), b"", b"", b"", b"", b"", b"")
    link.send("ward-a", seal(registry.identity(), purpose, fields, details, body), blobs(body))


def propose(server: Server, text: str, **changes: Any) -> str:
    """Lets the server propose an experiment; its digest."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    tell(
        server,
        "experiment",
        {
            "settings": text,
            "contract": digest,
            "rows": None,
            "terms": ExperimentTerms().to_plain(),
            **changes,
        },
    )
    return digest


def test_an_experiment_is_read_and_approved(server: Server, site: SiteKeys, text: str) -> None:
    assert "no experiment for this site now" in ran("site", "review")
    assert json.loads(ran("site", "review", "--json")) == {
        "experiment": None, "approved": False, "missing": None,
    }  # fmt: skip
    digest = propose(server, text)
    shown = ran("site", "review")
    assert text in shown
    assert f"digest: {digest}" in shown
    assert f"to approve it: fedlens site review --approve {digest[:12]}" in shown
    assert "images and clients not counted yet: fedlens site check\n" in shown
    for wrong in (digest[:11], "0" * 64, f"{digest}0"):
        assert "read what is proposed with: fedlens site review." in refused(
            "site", "review", "--approve", wrong
        )
    assert not (FOLDER / "approved").exists()
    approved = "approved: 'fedlens site start' computes it\n"
    said = ran("site", "review", "--approve", digest[:12].upper())
    assert said == f"{approved}kept: the approval of {digest}\n"
    assert (FOLDER / "approved" / f"{digest}.toml").read_text() == text
    said = ran("site", "review")
    assert said.startswith(approved)
    assert "to approve it" not in said
    other = propose(server, text.replace("rounds = 2", "rounds = 3"))
    assert f"digest: {other}" in ran("site", "review")
    assert ran("site", "review").startswith(f"the experiment {other[:12]} waits for: fedlens site review\n")


def test_what_the_policy_refuses_is_shown_and_cannot_be_approved(
    server: Server, site: SiteKeys, text: str
) -> None:
    ran("site", "decide", "--key", "officer.pem", "--new-key")
    write_site(FOLDER, allow={"max_rounds": 1})
    digest = propose(server, text)
    said = "an experiment of 2 rounds is not allowed: [allow] max_rounds = 1, in "
    cannot = f"the experiment {digest[:12]} cannot be approved: [allow] of site.toml refuses it"
    shown = ran("site", "review")
    assert shown.startswith(f"{cannot}\n")
    assert "it cannot be approved: reject it, or change the lines" in shown.partition(f"refused: {said}")[2]
    assert "to approve it" not in shown
    assert json.loads(ran("site", "review", "--json"))["missing"] == cannot
    assert said in refused("site", "review", "--approve", digest)
    ran("site", "review", "--export", "proposal.json")
    decide = ["site", "decide", "proposal.json", "--key", "officer.pem", "--out", "decision.json"]
    assert said in refused(*decide, "--approve", digest)
    assert "to approve it" not in ran("site", "decide", "proposal.json")
    assert not (FOLDER / "approved" / f"{digest}.toml").exists()
    write_site(FOLDER, allow={"max_rounds": 2})
    assert "refused:" not in ran("site", "review")
    assert ran("site", "review", "--approve", digest).startswith("approved: ")


def test_two_people_decide_one_of_them_on_another_machine(server: Server, site: SiteKeys, text: str) -> None:
    line = (
        ran("site", "decide", "--key", "officer.pem", "--new-key").partition("site.toml: ")[2].splitlines()[0]
    )
    assert Path("officer.pem").stat().st_mode & 0o777 == 0o600
    number = reviewer_number(base64.b64decode(line.partition(" = ")[2]))
    assert "in a new file" in refused("site", "decide", "--key", "officer.pem", "--new-key")
    write_site(FOLDER, {"exclude": "out.txt"}, allow={"reviewers": 2})
    (FOLDER / "out.txt").write_text("anna\nbert\n")
    said = "[allow] reviewers = 2, and [reviewers] names 0 besides this site, so that nothing can be approved"
    assert f"1 of 2 approvals; {said}" in ran("site", "review", "--approve", propose(server, text))
    assert said in runner.invoke(app, ["site", "check"]).stdout
    with (FOLDER / "site.toml").open("a") as file:
        file.write(f"\n[reviewers]\n{line}\n")
    digest = propose(server, text)
    half = "1 of 2 approvals; waits for another reviewer (approved by ward-a)"
    assert ran("site", "review", "--approve", digest).startswith(f"{half}\n")
    assert ran("site", "review").startswith(f"{half}\n")
    assert f"experiment {digest[:12]} (run): {half}" in ran("site", "status")
    assert json.loads(ran("site", "status", "--json"))["experiments"] == {f"{digest[:12]} (run)": half}
    assert f"note    experiment {digest[:12]}: {half}\n" in ran("site", "check")  # which reads no data for it
    allowed = (FOLDER / "site.toml").read_text()
    (FOLDER / "site.toml").write_text(allowed.replace("[allow]", "[allow]\nmax_rounds = 1"))
    changed = "the rules of site.toml have changed since the approval: allow.max_rounds; look again"
    assert f"experiment {digest[:12]} (run): {changed}: fedlens site review\n" in ran("site", "status")
    against = "an experiment of 2 rounds is not allowed: [allow] max_rounds = 1, in"
    assert f"note    experiment {digest[:12]}: {changed}: fedlens site review; {against}" in ran(
        "site", "check"
    )
    (FOLDER / "site.toml").write_text(allowed)
    checked = (FOLDER / "counted").stat()
    assert checked.st_mode & 0o777 == 0o600
    os.utime(FOLDER / "counted", (0, 1_000_000_000))
    ran("site", "review", "--export", "experiment.json")
    shown = ran("site", "decide", "experiment.json")
    assert f"digest: {digest}" in shown
    assert f"--approve {digest[:12]}" in shown
    decide = ("site", "decide", "experiment.json", "--out", "decision.json")
    assert "needs a key" in refused(*decide, "--approve", digest)
    wrong = refused(*decide, "--key", "officer.pem", "--approve", "0" * 64)
    assert "is proposed; read what is proposed with: fedlens site decide experiment.json." in wrong
    signed = ran(*decide, "--key", "officer.pem", "--approve", digest)
    decision = hashlib.sha256(Path("decision.json").read_bytes()).hexdigest()
    assert signed.endswith(f" the export of the site's log names its SHA-256 as decision: {decision}\n")
    rules = hashlib.sha256((FOLDER / "site.toml").read_bytes()).hexdigest()
    for read in (shown, ran("site", "review")):
        assert (
            f"rules of the site, which an approval binds but for cache and [keep]: site.toml, SHA-256 {rules}\n"
            in read
        )
        assert "    reviewers = 2\n" in read
        assert "    sent = false\n" in read
        listed = hashlib.sha256(b"anna\nbert\n").hexdigest()
        assert (
            f"exclusion list now, which no approval binds: out.txt, SHA-256 {listed}, 2 lines; 'site check' counts "
            "the images\n" in read
        )
        counted = "1 client: ward-a 8; 0 images left out by out.txt"
        assert f"\nimages and clients at the last 'site check', 2001-09-09 01:46 UTC: {counted}\n" in read
        assert re.search(r"\napproved until now by: ward-a, 20\d\d-\d\d-\d\d \d\d:\d\d UTC\n", read)
    assert ran("site", "review", "--import", "decision.json").startswith("approved: ")
    assert f"experiment {digest[:12]} (run): approved\n" in ran("site", "status")
    assert json.loads(ran("site", "review", "--json"))["approved"]
    both = re.search(r"by: (\S+), 20[^;]+ UTC; (\S+), 20[^;]+ UTC\n", ran("site", "review"))
    assert both is not None
    assert {*both.groups()} == {"ward-a", "officer"}  # in one second either may be first
    (FOLDER / "out.txt").unlink()
    assert "binds: the list of what is left out cannot be read: No such file" in ran("site", "review")
    ran(*decide, "--key", "officer.pem", "--reject", "no consent")
    with pytest.MonkeyPatch.context() as patched:  # a rejection needs no server
        patched.setattr("fedlens.site.proposed_experiment.proposed_experiment", None)
        said = ran("site", "review", "--import", "decision.json")
    assert said.startswith(f"the experiment {digest[:12]} was rejected by officer: no consent\n")
    assert f"kept: the rejection of {digest}" in said
    (line,) = [
        each
        for each in AskedLog.read(FOLDER).told
        if each.get("kind") == "approved" and each["by"] == "officer"
    ]
    assert line["decision"] == decision
    assert line["reviewer"] == number
    assert "this replaces" not in said
    assert "was rejected by officer" in ran("site", "review", "--approve", digest).partition("\n")[0]
    assert not json.loads(ran("site", "review", "--json"))["approved"]
    state = f"the experiment {digest[:12]} was rejected by officer: no consent"
    assert json.loads(ran("site", "status", "--json"))["experiments"] == {f"{digest[:12]} (run)": state}
    ran(*decide, "--key", "officer.pem", "--approve", digest)
    said = refused("site", "review", "--import", "decision.json")
    assert "officer takes it back by approving that file" in said
    ran(*said.partition("'fedlens ")[2].partition("'")[0].replace("FILE", "experiment.json").split())
    ran(*decide, "--key", "officer.pem", "--approve", digest)
    assert ran("site", "review", "--import", "decision.json").startswith("approved: ")
    ran("site", "review", "--reject", "too early")
    replaced = ran("site", "review", "--approve", digest).splitlines()[2]
    assert replaced.startswith("this replaces the rejection by ward-a of 20")
    assert replaced.endswith(" UTC: too early")
    said = ran("site", "leave")
    assert "ward-a has left hospitals: no process computes here" in said
    assert "the server knows\n" in said
    status = ran("site", "status")
    assert f"experiment {digest[:12]} (run): not computed: this site left on 20" in status
    assert "accept" not in status
    assert "approved" not in status
    assert ran("site", "review").startswith("this site left the federation on 20")
    come_back(FOLDER)
    assert "exclude one another" in refused("site", "review", "--approve", digest, "--reject", "no")
    Path("decision.json").write_text("{}")
    assert "no decision on an experiment" in refused("site", "review", "--import", "decision.json")


def test_a_review_opens_and_imports_nothing(
    server: Server, site: SiteKeys, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("planted.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(".")
    for name in ("subprocess:getoutput", "planted:run", "planted.py:run"):
        propose(server, text.replace('name = "mlp"', f'name = "{name}"'))
        said = refused("site", "review")
        assert "(experiment: model.name)" in said
        assert name in said
    assert "planted" not in sys.modules


def test_after_a_run_nobody_is_told_that_the_server_is_away(
    site: SiteKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, troubles = list[str](), list[Callable[[str], None]]()
    monkeypatch.setattr(
        "fedlens.site.start.ServerConnection", lambda *given, heard: troubles.append(given[3])
    )
    agent_of(FOLDER, said.append)
    troubles[0]("it is closed")
    assert said == ["the server cannot be reached, and is tried again: it is closed"]
    monkeypatch.setattr(Agent, "resting", True)
    troubles[0]("it sends nothing")
    assert len(said) == 1


@pytest.mark.parametrize("abstract", [False, True])
def test_status_and_systemd_say_what_a_site_does(
    site: SiteKeys, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    heard, troubles = list[Callable[[], None]](), list[Callable[[str], None]]()

    def connection(*given: Any, **options: Any) -> None:
        heard.append(options["heard"])
        troubles.append(given[3])

    def alarm() -> str:
        answer = runner.invoke(app, ["site", "status", "--check", "--json"])
        facts = json.loads(answer.stdout)
        assert answer.exit_code == bool(facts["alarm"])
        return str(facts["alarm"])

    monkeypatch.setattr("fedlens.site.start.ServerConnection", connection)
    name = f"fedlens-test-{os.getpid()}" if abstract else str(Path("notify").absolute())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}" if abstract else name)
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        write_private(FOLDER / TROUBLE, b"of an earlier process")
        agent_of(FOLDER, lambda line: None)
        with one_writer(FOLDER):
            heard[0]()
            assert (systemd.recv(1000), alarm()) == (b"STATUS=in touch with the server", "")
            (log := SiteLog(FOLDER / "log")).waits("rejected by Dr. Who")
            assert systemd.recv(1000) == b"STATUS=waits for a person: see 'fedlens site status'"
            assert alarm() == "rejected by Dr. Who"
            log.waits("")
            systemd.recv(1000)
            os.utime(FOLDER / CONTACT, (0, long_ago := time.time() - 7200))
            since = f"no contact with the server since {day(long_ago)}: "
            troubles[0](f"it refuses connections: {OFF}")
            assert (systemd.recv(1000), alarm()) == (
                f"STATUS={since}it refuses connections: {OFF}".encode(),
                "",
            )
            assert f"no contact    it refuses connections: {OFF}\n" in ran("site", "status")
            troubles[0]("it hangs")
            assert (systemd.recv(1000), alarm()) == (f"STATUS={since}it hangs".encode(), f"{since}it hangs")
            os.utime(FOLDER / CONTACT, (0, time.time() - 600))
            assert not alarm()  # not yet
            heard[0]()
            assert (systemd.recv(1000), alarm()) == (b"STATUS=in touch with the server", "")
            ends = site.certificate().not_after.timestamp()
            with pytest.MonkeyPatch.context() as later:
                later.setattr(time, "time", lambda: ends - 13 * 86_400)
                heard[0]()
                os.utime(FOLDER / CONTACT, (0, time.time()))
                assert alarm() == (
                    f"the certificate is valid until {day(ends)}: ask the operator to run the server, which renews it"
                )
            log.waits("an experiment waits")
            assert "waits for     an experiment waits\n" in ran("site", "status")
    assert alarm() == "'fedlens site start' does not run"  # it was killed, and left `waiting`
    assert json.loads(ran("site", "status", "--json"))["waits for"] == ""
    assert "acceptance    accepted at the last contact\n" in ran("site", "status")
    log.note("stopped", reason="this site was revoked")
    assert alarm() == "'fedlens site start' does not run; it ended: this site was revoked"
    assert "acceptance    see: fedlens site check --network\n" in ran("site", "status")
    log.note("trouble", what="it hangs")
    assert alarm() == "'fedlens site start' does not run"
    leave_folder(FOLDER)
    assert not alarm()


@pytest.mark.parametrize("text", ["[data]\ndataset = 'digits'\n", "not = [toml"])
def test_a_changed_site_file_ends_a_start_also_while_the_server_is_away(
    server: Server, site: SiteKeys, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()

    def say(line: str) -> None:
        said.append(line)
        (FOLDER / SITE_FILE).write_text(text)

    monkeypatch.setattr("fedlens.cli.site.say", say)
    server[1].close()
    late = threading.Timer(120, os.kill, (os.getpid(), signal.SIGTERM))  # in place of waiting for ever
    late.start()
    try:
        assert refused("site", "start") == f"{SITE_FILE} has changed: start the site again."
    finally:
        late.cancel()
    assert ["cannot be reached" in line for line in said] == [True]
    assert f'"reason":"{SITE_FILE} has changed' in (FOLDER / "log" / "site.jsonl").read_text()
    with one_writer(FOLDER, wait=False):
        pass


def test_a_message_that_is_no_experiment_is_refused(server: Server, site: SiteKeys, text: str) -> None:
    propose(server, text, contract="0" * 64)
    assert "the server's message is no experiment" in refused("site", "review")


def test_a_server_that_is_away_is_a_sentence(
    here: Path, site: SiteKeys, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server[1].close()
    fetch = proposed_experiment.proposed_experiment
    monkeypatch.setattr(fetch, "__defaults__", (None, 0.5, fetch.__defaults__[2]))
    note, _, said = runner.invoke(app, ["site", "review"]).stderr.partition("\n")
    assert re.fullmatch(f"note: tried again for 0.5 s: .* refuses connections: {OFF}", note)
    assert said.startswith("error: the server cannot be reached: ")
    assert "'fedlens site check --network' says which step fails" in said


def test_the_data_are_checked_without_and_with_an_experiment(
    server: Server, site: SiteKeys, text: str
) -> None:
    said = ran("site", "check")
    assert "ok      site.toml: it describes a dataset 'image-folder'" in said
    assert "ok      data: 8 images of 2 classes: no, yes" in said
    write_site(FOLDER, {"exclude": "out.txt"})
    assert (
        "FAILED  exclude: the list of what is left out cannot be read"
        in runner.invoke(app, ["site", "check"]).stdout
    )
    (FOLDER / "out.txt").write_text("0000.png\nnobody\n")
    assert (
        "note    exclude: 2 lines of out.txt: 1 image left out; no image or value here has the name 'nobody'"
        in ran("site", "check")
    )
    assert "ok      clients: 1 client: ward-a 7; 1 image left out by out.txt\n" in ran("site", "check")
    (FOLDER / "out.txt").unlink()
    write_site(FOLDER, {"labels": {"no": "", "yes": "sick"}}, allow={"min_examples": 3})
    assert "ok      clients: 1 client: ward-a 4\n" in ran("site", "check")
    write_site(FOLDER, {"labels": {"no": ""}}, allow={"min_examples": 5})
    assert "FAILED  clients: no client has 5 examples" in runner.invoke(app, ["site", "check"]).stdout
    write_site(FOLDER)
    digest = propose(server, text)
    ran("site", "review", "--approve", digest)
    before = sorted(path.name for path in (FOLDER / "approved").iterdir())
    assert f"ok      experiment {digest[:12]}: 1 client: ward-a 8" in ran("site", "check")
    write_site(FOLDER, {"clients": "patient"})
    assert "2 clients: ward-a/p1 4, ward-a/p2 4" in ran("site", "check")
    assert sorted(path.name for path in (FOLDER / "approved").iterdir()) == before  # no run was counted
    write_site(FOLDER, allow={"max_rounds": 1, "models": []})
    said = ran("site", "check")
    assert (
        f"note    experiment {digest[:12]}: the rules of site.toml have changed since the approval: allow"
        in said
    )
    assert "not allowed: [allow] models = [], in" in said
    write_site(FOLDER, {"clients": "hospital"})
    answer = runner.invoke(app, ["site", "check"])
    assert answer.exit_code == 1
    assert "FAILED  clients: the data have no column 'hospital'" in answer.stdout


@pytest.mark.parametrize(
    ("change", "step", "said"),
    [
        ({"min_examples": 8}, "site.toml", "'min_examples' is now a line of [allow]"),
        ({"dataset": {"name": "image-folder", "path": "elsewhere"}}, "data", "does not exist"),
        ({"dataset": {"name": "imagefolder"}}, "data", "imagefolder"),
    ],
)
def test_what_is_wrong_with_the_data_is_a_step(
    site: SiteKeys, change: dict[str, Any], step: str, said: str
) -> None:
    text = (FOLDER / "site.toml").read_text()
    try:
        write_site(FOLDER, change)
    except Exception:  # the file is written before it is read
        assert (FOLDER / "site.toml").read_text() != text
    answer = json.loads(runner.invoke(app, ["site", "check", "--json"]).stdout)
    assert not answer["ok"]
    assert answer["steps"][-1]["name"] == step
    assert said in answer["steps"][-1]["what"]


def test_a_site_works_until_the_run_has_ended_or_it_is_revoked(
    server: Server, site: SiteKeys, text: str
) -> None:
    assert "last contact  none" in ran("site", "status")
    digest = propose(server, text)
    tell(server, "goodbye", {"outcome": "finished", "run": "run"})
    said = ran("site", "start", "--once")
    assert f"the experiment {digest[:12]} waits for: fedlens site review" in said
    assert "the run run has finished" in said
    assert json.loads(ran("site", "status", "--json"))["waits for"] == ""
    assert "nobody has decided on an experiment" in ran("site", "status")
    ran("site", "review", "--approve", digest)
    contact = FOLDER / CONTACT
    os.utime(contact, (0, before := time.time() - 30))  # a contact is not one of its minute
    ran("site", "review")
    assert contact.stat().st_mtime > before + 20
    os.utime(contact, (0, before))
    tell(server, "goodbye", {"outcome": "finished", "run": "run"})
    ran("site", "start", "--once")
    assert contact.stat().st_mtime > before + 20
    facts = json.loads(ran("site", "status", "--json"))
    assert facts["experiments"] == {f"{digest[:12]} (run)": "approved"}
    assert facts["last contact"] == day(contact.stat().st_mtime)
    server[0].revoke("ward-a")
    assert refused("site", "start").startswith("this site was revoked")
