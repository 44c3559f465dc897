"""Rotation of the issuer by a root on the same machine and on another, and what each refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cryptography import x509

from fedlens.base.errors import IdentityError
from fedlens.identity.authority import DAY, certificates, check_issuer, der, make_root, sign_issuer
from fedlens.identity.federation_folder import FederationFolder
from fedlens.identity.site_keys import SiteKeys
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, at, federation_in, issuer_of, joined


def test_a_root_on_another_machine_signs_request_files(tmp_path: Path) -> None:
    federation = FederationFolder.create(tmp_path / "hospitals", (HOST, 443), root=None, clock=lambda: NOW)
    assert federation.warnings() == []
    with pytest.raises(IdentityError, match="hospitals has no root yet; sign its request where the root is"):
        federation.invite("ward-a")
    elsewhere = tmp_path / "elsewhere"
    root = make_root(elsewhere, "hospitals", ROOT, NOW)
    first = sign_issuer(elsewhere, federation.request_issuer(), ROOT, NOW)
    federation.install_issuer(first)
    assert federation.root == root
    assert not (federation.folder / "root").exists()
    site, identity = joined(federation, "ward-a", tmp_path), federation.identity().fingerprint
    with pytest.raises(IdentityError, match="the root of hospitals is not here"):
        federation.rotate(ROOT)
    assert not (federation.folder / "issuer.next.pem").exists()
    with pytest.raises(IdentityError, match="waits for no issuer"):
        federation.install_issuer(first)
    request = federation.request_issuer()
    second = sign_issuer(elsewhere, request, ROOT, NOW)
    federation.install_issuer(second)
    assert federation.identity().fingerprint != identity
    federation.admit(site.certificate())  # the server issued it, so it stays valid
    assert joined(federation, "ward-b", tmp_path).certificate().issuer == 2
    again = sign_issuer(elsewhere, request, ROOT, NOW)
    federation.request_issuer()
    with pytest.raises(IdentityError, match="does not fit the last request"):
        federation.install_issuer(again)


def test_a_root_signs_for_its_federation_and_never_a_number_twice(tmp_path: Path) -> None:
    federation, root = federation_in(tmp_path), tmp_path / "hospitals" / "root"
    backup = Path(shutil.copytree(root, tmp_path / "backup"))
    request = federation.request_issuer()
    with pytest.raises(IdentityError, match=r"the key in root.pem cannot be read: the passphrase is wrong"):
        sign_issuer(root, request, b"another passphrase", NOW)
    with pytest.raises(IdentityError, match=r"the key in root.pem is encrypted"):
        sign_issuer(root, request, b"", NOW)
    numbers = [number(sign_issuer(root, request, ROOT, NOW)) for _ in range(2)]
    assert numbers == ["issuer-2", "issuer-3"]
    federation.rotate(ROOT)
    with pytest.raises(IdentityError, match="the server has issuer 4, but this root signed only 1"):
        sign_issuer(backup, federation.request_issuer(), ROOT, NOW)
    for wrong, text in (
        ({**json.loads(request), "federation": "others"}, "not one of the federation hospitals"),
        ({**json.loads(request), "public": "AAAA"}, "not a P-256 key"),
        ({**json.loads(request), "above": True}, "it needs exactly"),
    ):
        with pytest.raises(IdentityError, match=text):
            sign_issuer(root, json.dumps(wrong).encode(), ROOT, NOW)
    with pytest.raises(IdentityError, match="has a root already"):
        make_root(root, "hospitals", ROOT, NOW)
    with pytest.raises(IdentityError, match="fewer than 12 characters"):
        make_root(tmp_path / "short", "hospitals", b"short", NOW)
    with pytest.raises(IdentityError, match="fewer than 12 characters"):
        FederationFolder.create(tmp_path / "new" / "clinics", (HOST, 443), b"short")
    assert list((tmp_path / "new").iterdir()) == []


def number(signed: bytes) -> str:
    (name,) = x509.load_pem_x509_certificates(signed)[0].subject
    return str(name.value)


def test_the_server_refuses_an_issuer_of_another_root(tmp_path: Path) -> None:
    federation, other = federation_in(tmp_path), tmp_path / "other"
    make_root(other, "hospitals", ROOT, NOW)
    (other / "issuer").write_bytes(b"5")
    signed = sign_issuer(other, federation.request_issuer(), ROOT, NOW)
    with pytest.raises(IdentityError, match="of another root than that of hospitals"):
        federation.install_issuer(signed)
    mixed = signed.partition(b"-----END CERTIFICATE-----\n")
    ours = (federation.folder / "root.pem").read_bytes()
    with pytest.raises(IdentityError, match="not signed by the authority"):
        federation.install_issuer(mixed[0] + mixed[1] + ours)
    with pytest.raises(IdentityError, match="contains no certificates"):
        federation.install_issuer(b"")
    assert issuer_of(federation)[1].subject.rfc4514_string() == "CN=issuer-1"


def test_the_operator_hears_of_the_end_of_an_issuer_60_days_before(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    assert at(NOW + 669 * DAY, federation).warnings() == []
    (text,) = at(NOW + 671 * DAY, federation).warnings()
    assert text.startswith("issuer 1 ends on ")
    assert text.endswith(f"run: fedlens federation rotate {federation.folder}")
    late = NOW + 700 * DAY
    assert at(late, federation).renew_server()
    assert not at(late + DAY, federation).renew_server()  # a new certificate would end with the issuer too
    invitation = at(late, federation).invite("ward-a")
    site = SiteKeys.join(tmp_path / "ward-a", invitation)
    site.install(at(late, federation).enrol(site.enrolment(invitation), HOST), late)
    assert site.certificate().not_after.timestamp() == NOW + 730 * DAY
    at(late, federation).rotate(ROOT)
    assert at(late, federation).warnings() == []
    issuer, root = certificates(site.folder / "tls.pem")[1], certificates(federation.folder / "root.pem")[0]
    with pytest.raises(IdentityError, match="issuer 1 is not valid now"):
        check_issuer(issuer, root, NOW + 731 * DAY)


def test_a_root_is_small_and_lasts_20_years(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    (root,) = certificates(federation.folder / "root.pem")
    assert len(der(root)) < 450
    assert root.not_valid_after_utc.timestamp() == NOW + 7300 * DAY
    issuer = issuer_of(federation)[1].extensions.get_extension_for_class(x509.BasicConstraints)
    assert (issuer.value.path_length, issuer.critical) == (0, True)


def test_a_crash_during_a_rotation_leaves_a_server_that_repairs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federation_in(tmp_path)
    identity = federation.identity().fingerprint
    with monkeypatch.context() as patched:
        patched.setattr(FederationFolder, "renew_server", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            federation.rotate(ROOT)
    assert federation.renew_server()
    assert not federation.renew_server()
    assert federation.identity().fingerprint != identity
