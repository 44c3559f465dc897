"""`fedlens federation` and `fedlens site`: the whole way of a site, and each wrong step as a sentence."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import IdentityError
from fedlens.cli import passphrases
from fedlens.cli.main import app
from fedlens.engines.links.https import HttpsLink
from fedlens.identity.authority import DAY
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.invitation import Invitation
from fedlens.identity.site_keys import SiteKeys
from tests.link_kit import Federation
from tests.unit.cli.commands import ran, refused, runner
from tests.unit.cli.conftest import command
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, at


def invited(name: str = "ward-a", *options: str) -> Path:
    path = Path(f"{name}.invitation")
    path.write_text(ran("federation", "invite", "hospitals", name, *options))
    return path


def test_a_site_joins_is_accepted_and_is_revoked(server: tuple[FederationFolder, HttpsLink]) -> None:
    said = ran("site", "join", invited(), "--data", "scans")
    (site,) = server[0].sites()
    words = server[0].words(site)
    assert site.state == "pending"
    assert words in said
    assert "Delete ward-a.invitation" in said
    assert words in ran("site", "status")
    assert "has not accepted this site yet" in runner.invoke(app, ["site", "check", "--network"]).stdout
    short = " ".join(word[:4].upper() for word in words.split())  # typed, at the prompt
    assert "ward-a is accepted" in ran("federation", "accept", "hospitals", "ward-a", typed=short + "\n")
    checked = json.loads(ran("site", "check", "--network", "--json"))
    assert checked["ok"]
    names = [step["name"] for step in checked["steps"]]
    assert names == ["name", "port", "TLS", "clock", "certificate", "acceptance"]
    listed = json.loads(ran("federation", "list", "hospitals", "--json"))
    assert [(each["name"], each["state"], each["words"]) for each in listed["sites"]] == [
        ("ward-a", "accepted", words)
    ]
    assert words in ran("federation", "list", "hospitals")
    again = "fedlens federation invite hospitals ward-a --replace"
    assert again in ran("federation", "revoke", "hospitals", "ward-a")
    answer = runner.invoke(app, ["site", "check", "--network"])
    assert answer.exit_code == 1
    assert "FAILED  acceptance: this site was revoked" in answer.stdout


def test_site_toml_describes_the_data_and_is_never_replaced(
    server: tuple[FederationFolder, HttpsLink],
) -> None:
    invitation = invited()
    ran("site", "join", invitation, "--data", "scans")
    file = Path("fedlens-site/site.toml")
    text = file.read_text()
    assert 'dataset = { name = "image-folder", path = "../scans", table = "../scans/scans.csv" }' in text
    assert "# The table has the columns path, label, patient." in text
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.write_text("mine")
    ran("site", "join", invitation, "--data", "scans")  # again, as after a connection that was cut
    assert file.read_text() == "mine"


def test_data_of_no_format_are_a_comment(server: tuple[FederationFolder, HttpsLink]) -> None:
    Path("odd").mkdir()
    ran("site", "join", "-", "--data", "odd", typed=invited().read_text())
    text = Path("fedlens-site/site.toml").read_text()
    assert "# no format fits: there are no annotations" in text
    assert '# dataset = { name = "image-folder", path = "../odd" }' in text


def test_an_invitation_that_was_used_or_is_stale_is_refused(
    server: tuple[FederationFolder, HttpsLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = invited()
    ran("site", "join", invitation, "--data", "scans")
    second = ["site", "join", invitation, "--data", "scans", "--folder", "other"]
    assert "refuses the invitation: it was used" in refused(*second)
    listed = ran("federation", "list", "hospitals")
    assert "alarm: " in listed
    assert "ward-a: its invitation was used with another key, from 127.0.0.1" in listed
    monkeypatch.setattr("time.time", lambda: NOW + 4 * DAY)
    assert "the invitation expired on" in refused(*second)
    invitation.write_text("{}")
    assert "the invitation is damaged" in refused(*second)
    assert "cannot be read" in refused("site", "join", "no such file", "--data", "scans")


def test_a_new_key_needs_a_new_folder(server: tuple[FederationFolder, HttpsLink]) -> None:
    ran("site", "join", invited(), "--data", "scans")
    again = ["site", "join", invited("ward-a", "--replace"), "--data", "scans"]
    said = refused(*again)
    assert "the server refuses the invitation" in said
    assert "move fedlens-site away and join anew" in said
    Path("fedlens-site").rename("old")
    assert "its state there: pending" in ran(*again)


def test_an_invitation_is_no_argument() -> None:
    said = refused("site", "join", '{"secret": "c2VjcmV0"}', "--data", "scans")
    assert "can be read by every user" in said
    assert "c2VjcmV0" not in said


def test_joining_says_which_step_fails(here: Path) -> None:
    kit = Federation(here)
    with kit.link():
        pass
    file = kit.registry.folder / "federation.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "port": kit.port}))
    said = refused("site", "join", invited(), "--data", "scans")
    assert said.startswith(f"cannot join: port {kit.port} of {HOST} refuses connections: ")
    assert "no data" in refused("site", "join", "ward-a.invitation", "--data", "no data")


def test_a_folder_of_another_site_or_federation_is_refused(
    server: tuple[FederationFolder, HttpsLink], here: Path
) -> None:
    ran("site", "join", invited(), "--data", "scans")
    said = refused("site", "join", invited("ward-b"), "--data", "scans")
    assert "has the keys of ward-a in the federation hospitals; take another folder" in said
    other = FederationFolder.create(here / "others", (HOST, 443), ROOT)
    Path("others.invitation").write_text(other.invite("ward-a").text())
    said = refused("site", "join", "others.invitation", "--data", "scans")
    assert "has the keys of ward-a in the federation hospitals" in said
    assert "is not the folder of a site" in refused("site", "status", "--folder", "nowhere")


def test_wrong_words_are_refused_and_say_what_may_have_happened(federation: FederationFolder) -> None:
    invitation = federation.invite("ward-a")
    keys = SiteKeys.join(Path("ward-a"), invitation)
    keys.install(federation.enrol(keys.enrolment(invitation), HOST), NOW)
    words = keys.words()
    wrong = ["federation", "accept", "hospitals", "ward-a", "--fingerprint"]
    short = " ".join(word[:3] for word in words.split())
    for given in (words.rsplit(" ", 1)[0], words[::-1], "", f"{words} zebra", short):
        said = refused(*wrong, given, typed="\n")
        assert "these are not the eight words" in said
        assert "fedlens federation revoke hospitals ward-a" in said
        assert words not in said  # a guesser learns nothing
    assert federation.site("ward-a").state == "pending"
    ran(*wrong, words)
    assert federation.site("ward-a").state == "accepted"


def test_names_are_checked(federation: FederationFolder) -> None:
    assert "hospital is not the folder of a federation" in refused("federation", "list", "hospital")
    assert not Path("hospital").exists()
    ran("federation", "invite", "hospitals", "ward-a")
    assert "ward-a  invitation until 20" in ran("federation", "list", "hospitals")
    said = refused("federation", "accept", "hospitals", "ward-a", "--fingerprint", "a")
    assert "ward-a has not joined yet; its invitation is open until" in said
    keys = SiteKeys.join(Path("a"), invitation := federation.invite("ward-a"))
    federation.enrol(keys.enrolment(invitation), HOST)
    assert "the name ward-a is taken" in refused("federation", "invite", "hospitals", "ward-a")
    assert "ward-a  invitation until" not in ran("federation", "list", "hospitals")  # it was used
    ran("federation", "invite", "hospitals", "ward-a", "--replace")
    assert "ward-a  invitation until 20" in ran("federation", "list", "hospitals")
    assert "did you mean 'ward-a'" in refused("federation", "revoke", "hospitals", "ward-b")
    assert "is not a name" in refused("federation", "invite", "hospitals", "../x")
    both = refused("federation", "invite", "hospitals", "ward-a", "--replace", "--same-key")
    assert "contradict each other" in both


def test_an_invitation_is_alone_on_standard_output_and_its_file_is_private(
    federation: FederationFolder,
) -> None:
    answer = runner.invoke(app, ["federation", "invite", "hospitals", "ward-a"])
    assert set(json.loads(answer.stdout)) == {
        *("federation", "host", "port", "root", "name", "secret", "expires")
    }
    argv, env = command(["federation", "invite", "hospitals", "ward-b"])
    with open("ward-b.invitation", "wb") as file:
        subprocess.run(argv, env=env, stdout=file, stderr=subprocess.PIPE, check=True)
    assert Path("ward-b.invitation").stat().st_mode & 0o777 == 0o600
    assert json.loads(Path("ward-b.invitation").read_text())["name"] == "ward-b"


def test_the_end_of_the_issuer_is_a_warning(
    federation: FederationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.invoke(app, ["federation", "list", "hospitals"]).stderr == ""
    monkeypatch.setattr(FederationFolder.__init__, "__defaults__", (None, lambda: NOW + 700 * DAY))
    said = runner.invoke(app, ["federation", "list", "hospitals"]).stderr
    assert said.startswith("warning: issuer 1 ends on ")
    assert "fedlens federation rotate hospitals" in said


def test_rotation_needs_the_passphrase_of_the_root(federation: FederationFolder, here: Path) -> None:
    wrong = here / "wrong"
    wrong.write_bytes(b"incorrect horse")
    wrong.chmod(0o600)
    said = refused("federation", "rotate", "hospitals", "--root-passphrase-file", wrong)
    assert "the passphrase is wrong" in said
    assert "incorrect horse" not in said
    assert federation.issuer()[0] == 1
    assert "has issuer 2 until" in ran("federation", "rotate", "hospitals", "--root-passphrase-file", "pw")
    wrong.chmod(0o644)
    said = refused("federation", "rotate", "hospitals", "--root-passphrase-file", wrong)
    assert "wrong is open to other users" in said


def test_the_root_of_another_machine_signs_what_is_carried(here: Path) -> None:
    root = ["--root", "elsewhere", "--root-passphrase-file", "pw"]
    said = ran("federation", "create", "hospitals", "--host", HOST, "--offline")
    assert "has no root yet" in refused("federation", "invite", "hospitals", "ward-a")
    assert "waits for its root" in ran("federation", "list", "hospitals")
    signed = ran("federation", "sign", "hospitals.request", *root)
    words = [next(line for line in text.splitlines() if line.startswith("words")) for text in (said, signed)]
    assert words[0] == words[1]
    assert "has issuer 1 until" in ran("federation", "install", "hospitals", "hospitals.issuer")
    assert "waits for no issuer" not in ran("federation", "rotate", "hospitals")
    old = refused("federation", "install", "hospitals", "hospitals.issuer")
    assert "does not fit the last request" in old
    elsewhere = ["--root", "new", "--root-passphrase-file", "pw"]
    assert "has no root, and the server has issuer 1" in refused(
        "federation", "sign", "hospitals.request", *elsewhere
    )
    ran("federation", "sign", "hospitals.request", *root)
    assert "has issuer 2 until" in ran("federation", "install", "hospitals", "hospitals.issuer")
    assert not (here / "hospitals" / "root").exists()
    Path("other.request").write_text("{}")
    assert "other.request is damaged" in refused("federation", "sign", "other.request", *root)


def test_a_federation_is_made_once_and_its_root_has_a_passphrase(here: Path) -> None:
    made = ["federation", "create", "hospitals", "--host", HOST, "--root-passphrase-file"]
    short = here / "short"
    short.write_bytes(b"short")
    short.chmod(0o600)
    assert "fewer than 12 characters" in refused(*made, short)
    assert "is empty" in refused(*made, _private(here / "empty", b"\n"))
    assert "is not a host name" in refused(
        "federation", "create", "x", "--host", "a b", "--root-passphrase-file", "pw"
    )
    assert "next: fedlens federation invite hospitals SITE" in ran(*made, "pw")
    assert "exists already" in refused(*made, "pw")
    offline = refused(
        "federation", "create", "y", "--host", HOST, "--offline", "--root-passphrase-file", "pw"
    )
    assert "makes no root here" in offline


def _private(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_keys_with_a_passphrase(
    server: tuple[FederationFolder, HttpsLink], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = _private(here / "good", b"a long secret"), _private(here / "bad", b"another one")
    ran("site", "join", invited(), "--data", "scans", "--passphrase-file", good)
    check = ["site", "check", "--network", "--passphrase-file"]
    assert "ENCRYPTED" in Path("fedlens-site/keys/identity.pem").read_text()
    assert ran("site", "status")  # needs no secret
    said = runner.invoke(app, [*check, str(bad)])
    assert "the passphrase is wrong" in said.stdout
    assert "another one" not in said.output
    steps = runner.invoke(app, [*check, str(good)]).stdout
    assert "FAILED  acceptance: the operator of the server has not accepted" in steps
    credentials = here / "credentials"
    credentials.mkdir()
    _private(credentials / "fedlens-passphrase", b"a long secret\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert "FAILED  acceptance" in runner.invoke(app, ["site", "check", "--network"]).stdout


def test_an_invitation_is_written_to_a_new_file_and_only_if_there_is_one(
    federation: FederationFolder,
) -> None:
    invite, file = ["federation", "invite", "hospitals", "ward-a", "--out"], Path("ward-a.invitation")
    assert "nowhere is no folder" in refused(*invite, "nowhere/file")
    assert "bring it to ward-a" in ran(*invite, file)
    written = file.read_bytes()
    assert Invitation.read(written, NOW).name == "ward-a"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "ward-a.invitation exists already" in refused(*invite, file, "--replace")
    assert file.read_bytes() == written
    bad = ["federation", "invite", "hospitals", "../x", "--out", "other"]
    assert "is not a name" in refused(*bad)
    assert not Path("other").exists()


def test_a_missing_passphrase_names_its_option(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> int:
        raise OSError

    monkeypatch.setattr("fedlens.cli.passphrases.os.open", absent)
    made = ["federation", "create", "new", "--host", HOST]
    said = refused(*made, "--passphrase-file", "pw")
    assert "for the root of new" in said
    assert "with --root-passphrase-file FILE" in said
    said = refused(*made, "--root-passphrase-file", "/dev/fd/9999", "--encrypt")
    assert "/dev/fd/9999 cannot be read" in said
    with pytest.raises(IdentityError, match="with --passphrase-file FILE"):
        passphrases.new_passphrase(here, True, None)


def test_a_passphrase_that_no_key_needs_is_refused(federation: FederationFolder) -> None:
    said = refused("federation", "rotate", "hospitals", "--passphrase-file", "pw")
    assert "the keys have no passphrase" in said


def test_a_passphrase_from_a_descriptor() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a long secret\n")
    os.close(writing)
    assert passphrases.read_passphrase("it", Path(f"/dev/fd/{reading}")) == b"a long secret"
    os.close(reading)


# A terminal on which the words of the arguments are typed, each after its prompt; prints what it shows.
TERMINAL = """
import os, pty, sys
child, end = pty.fork()
if child == 0:
    code = "from fedlens.cli.passphrases import read_passphrase as r; print(r('the word', None, new=True).hex())"
    os.execv(sys.executable, [sys.executable, "-c", code])
shown = b""
for word in sys.argv[1:]:
    while not shown.endswith(b": "):
        shown += os.read(end, 1)
    os.write(end, word.encode() + b"\\n")
    shown += b"|"
try:
    while piece := os.read(end, 1000):
        shown += piece
except OSError:
    pass
sys.stdout.buffer.write(shown)
"""


def test_a_passphrase_is_typed_twice_without_echo() -> None:
    def shown(*words: str) -> bytes:
        argv, env = command([])
        return subprocess.run(
            [argv[0], "-c", TERMINAL, *words], env=env, capture_output=True, timeout=300, check=True
        ).stdout

    good = shown("horse", "horse")
    assert b"horse" not in good
    assert b"horse".hex().encode() in good
    assert b"the word, once more: " in good
    assert b"the two passphrases differ" in shown("horse", "mare")


def test_without_a_terminal_a_file_is_needed(here: Path, fedlens_process: Callable[..., Any]) -> None:
    code = "import os; os.setsid(); from fedlens.cli.main import main; main()"
    argv, env = command(["federation", "create", "x", "--host", HOST])
    argv[argv.index("-c") + 1] = code
    done = subprocess.run(
        argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 2
    assert "there is no terminal to ask for a passphrase" in done.stderr
    assert not (here / "x").exists()


def test_the_folder_of_another_user_is_refused(
    federation: FederationFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert f"belongs to the user with number {mine}" in refused("federation", "list", "hospitals")


def test_the_same_key_comes_back_after_its_certificate_expired(
    server: tuple[FederationFolder, HttpsLink],
) -> None:
    Path("fedlens-site").mkdir(mode=0o700)
    past = at(NOW - 100 * DAY, server[0])
    keys = SiteKeys.join(Path("fedlens-site/keys"), invitation := past.invite("ward-a"))
    keys.install(past.enrol(keys.enrolment(invitation), HOST), NOW)
    past.accept("ward-a", keys.identity().fingerprint)
    before, check = keys.words(), ["site", "check", "--network"]
    assert "FAILED  certificate: the certificate of ward-a expired on" in runner.invoke(app, check).stdout
    said = ran("site", "join", invited("ward-a", "--same-key"), "--data", "scans")
    assert "its state there: accepted" in said
    assert before in said
    assert "ok      acceptance" in ran(*check)


def test_a_site_with_an_expired_certificate_hears_what_to_ask_for(federation: FederationFolder) -> None:
    past = at(NOW - 100 * DAY, federation)
    keys = SiteKeys.join(Path("fedlens-site/keys"), invitation := past.invite("ward-a"))
    keys.install(past.enrol(keys.enrolment(invitation), HOST), NOW)
    Path("fedlens-site").chmod(0o700)
    with pytest.raises(
        Exception, match=r"expired on .* fedlens federation invite hospitals ward-a --same-key"
    ):
        keys.check_certificate(NOW)
    assert "valid until" in ran("site", "status")


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("cryptography", ["federation", "list", "x"], "pip install 'fedlens[network]'."),
        ("aiohttp", ["site", "join", "x", "--data", "."], "pip install 'fedlens[network]'."),
        ("fcntl", ["site", "status"], "run on Linux only."),
    ],
)
def test_what_a_federation_needs_is_a_sentence(
    here: Path, module: str, arguments: list[str], said: str
) -> None:
    argv, env = command(arguments)
    at = argv.index("-c") + 1
    argv[at] = f"import sys; sys.modules[{module!r}] = None; {argv[at]}"
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: this command needs {module}, which is not here. ")
    assert done.stderr.rstrip().endswith(said)
