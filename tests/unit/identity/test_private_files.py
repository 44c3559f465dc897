"""Secrets: modes of files and folders, keys in files, and nothing of a key in a text."""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
from pathlib import Path

import pytest

from fedlens.base.errors import IdentityError, RunDirectoryError, RunFailed
from fedlens.identity.authority import DAY, host_name
from fedlens.identity.federation_folder import FederationFolder, NotAdmitted
from fedlens.identity.keys import KeyPair
from fedlens.identity.private_files import (
    in_use,
    one_writer,
    private_folder,
    read_private,
    service_passphrase,
    write_private,
)
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, at, federation_in, joined


def test_files_are_0600_in_folders_of_0700_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        federation = FederationFolder.create(tmp_path / "clinics", (HOST, 443), ROOT, clock=lambda: NOW)
        site = joined(federation, "ward-a", tmp_path)
        federation.suspend("ward-a", "two addresses")
    finally:
        os.umask(before)
    for path in (*federation.folder.rglob("*"), *site.folder.rglob("*"), federation.folder, site.folder):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_file_or_folder_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_in(tmp_path)
    (federation.folder / "root.pem").chmod(0o640)
    with pytest.raises(IdentityError, match=r"root.pem is open to other users .*0640.*chmod 600"):
        federation.invite("ward-a")
    federation.folder.chmod(0o755)
    with pytest.raises(IdentityError, match=r"hospitals is open to other users .*chmod 700"):
        FederationFolder(federation.folder)
    federation.folder.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(
            IdentityError, match=r"hospitals belongs to the user with number \d+ .*sudo --user"
        ):
            FederationFolder(federation.folder)
    (tmp_path / "link").symlink_to(federation.folder)
    with pytest.raises(RunDirectoryError, match="is a symbolic link"):
        private_folder(tmp_path / "link")
    with pytest.raises(IdentityError, match="none is not the folder of a federation"):
        FederationFolder(tmp_path / "none")
    with pytest.raises(IdentityError, match="exists already"):
        FederationFolder.create(federation.folder, (HOST, 443), ROOT, clock=lambda: NOW)


def test_a_file_of_secrets_is_small_and_no_link(tmp_path: Path) -> None:
    write_private(tmp_path / "a", b"1" * 2**20)
    assert len(read_private(tmp_path / "a")) == 2**20
    write_private(tmp_path / "a", b"1" * (2**20 + 1))
    with pytest.raises(IdentityError, match="a is larger than 1,048,576 bytes"):
        read_private(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(RunDirectoryError, match="b is a symbolic link"):
        read_private(tmp_path / "b")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    for content in (b"{", b"[1]", b"3"):
        write_private(federation.folder / "sites" / "ward-a.json", content)
        with pytest.raises(IdentityError, match=r"ward-a\.json is damaged"):
            federation.site("ward-a")


def test_old_invitations_are_deleted(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    for name, when in (("ward-a", NOW), ("ward-b", NOW + 20 * DAY), ("ward-c", NOW + 40 * DAY)):
        at(when, federation).invite(name)
    kept = sorted(path.stem for path in (federation.folder / "invitations").iterdir())
    assert kept == ["ward-b", "ward-c"]


def test_changes_of_a_folder_wait_for_one_another(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with one_writer(tmp_path):
            order.append("second")

    with one_writer(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFailed, match="the lock could not be written"):
        second()


def test_keys_are_encrypted_with_a_passphrase_and_never_shown(tmp_path: Path) -> None:
    pair, path = KeyPair.make(), tmp_path / "identity.pem"
    secret = pair.key.private_numbers().private_value
    for passphrase in (None, b"a passphrase"):
        write_private(path, pair.pem(passphrase))
        assert KeyPair.read(path, passphrase).fingerprint == pair.fingerprint
        assert (b"ENCRYPTED" in path.read_bytes()) is (passphrase is not None)
    assert f"{secret:x}" not in repr(pair)
    assert repr(pair) == f"KeyPair({pair.fingerprint.hex()[:16]}...)"
    with pytest.raises(TypeError):
        pickle.dumps(pair)
    write_private(path, path.read_bytes()[:-60])
    with pytest.raises(IdentityError, match="the passphrase is wrong, or the file is damaged"):
        KeyPair.read(path, b"a passphrase")
    write_private(path, b"")
    with pytest.raises(IdentityError, match="cannot be read: the file is damaged"):
        KeyPair.read(path)


def test_an_invitation_does_not_show_its_secret(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    invitation = federation.invite("ward-a")
    secret = invitation.secret
    assert len(secret) == 32
    assert repr(secret) not in repr(invitation)
    stored = b"".join(path.read_bytes() for path in federation.folder.rglob("*") if path.is_file())
    assert secret not in stored
    assert secret.hex().encode() not in stored
    assert len(invitation.text()) < 1000
    assert "\n" not in invitation.text()


def test_a_service_reads_its_passphrase_from_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert service_passphrase() is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert service_passphrase() is None
    (tmp_path / "fedlens-passphrase").write_bytes(b"of the server\n")
    assert service_passphrase() == b"of the server"


def test_a_refusal_keeps_its_reason_over_processes() -> None:
    refused = pickle.loads(pickle.dumps(NotAdmitted("ward-a is revoked", "revoked")))
    assert (refused.reason, str(refused)) == (
        "revoked",
        "ward-a is revoked; ask the operator of the federation.",
    )


@pytest.mark.parametrize("host", ["", "fed example", "-a", "a..b", "a" * 254, "fed.example.org\n", "a/b"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    with pytest.raises(IdentityError, match="is not a host name or an address"):
        host_name(host)
    for good in ("fed.example.org", "192.0.2.1", "2001:db8::1", "localhost"):
        host_name(good)


def test_who_only_asks_whether_a_folder_is_in_use_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_writer(tmp_path, wait=False):
        assert in_use(tmp_path)
        with (
            pytest.raises(IdentityError, match="another process uses the folder"),
            one_writer(tmp_path, wait=False),
        ):
            pass
    assert not in_use(tmp_path)
    asking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("fedlens.identity.private_files.time.sleep", lambda seconds: os.close(asking))
    with one_writer(tmp_path, wait=False):
        assert in_use(tmp_path)
