"""Enrolment: an invitation works once, for one key, in time; what the operator decides after it; renewal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.base.errors import IdentityError
from fedlens.identity import federation_folder
from fedlens.identity.authority import DAY, HOUR, issue, pem, read_chain
from fedlens.identity.federation_folder import FederationFolder, NotAdmitted, SiteRecord
from fedlens.identity.invitation import Invitation
from fedlens.identity.keys import KeyPair
from fedlens.identity.plain_message import LARGEST_MESSAGE, write_message
from fedlens.identity.signing import key_request
from fedlens.identity.site_keys import SiteKeys
from tests.unit.identity.federation_kit import HOST, NOW, ROOT, at, federation_in, issuer_of, joined


@pytest.fixture
def federation(tmp_path: Path) -> FederationFolder:
    return federation_in(tmp_path)


@pytest.fixture
def invitation(federation: FederationFolder) -> Invitation:
    return federation.invite("ward-a")


@pytest.fixture
def site(invitation: Invitation, tmp_path: Path) -> SiteKeys:
    return SiteKeys.join(tmp_path / "ward-a", invitation)


def test_a_site_is_pending_until_people_have_compared_its_words(
    federation: FederationFolder, site: SiteKeys, invitation: Invitation
) -> None:
    assert site.install(federation.enrol(site.enrolment(invitation), HOST), NOW) == "pending"
    with pytest.raises(NotAdmitted, match="ward-a is pending"):
        federation.admit(site.certificate())
    (record,) = federation.sites()
    assert federation.words(record) == site.words()
    assert len(site.words().split()) == 8
    with pytest.raises(IdentityError, match="ward-a has another key now"):
        federation.accept("ward-a", KeyPair.make().fingerprint)
    federation.accept("ward-a", record.fingerprint)
    assert federation.admit(site.certificate()).fingerprint == site.identity().fingerprint
    with pytest.raises(IdentityError, match="has no site 'ward-q'; did you mean 'ward-a'"):
        federation.accept("ward-q", record.fingerprint)


def test_the_words_differ_in_a_federation_of_another_root(
    federation: FederationFolder, site: SiteKeys, tmp_path: Path
) -> None:
    other = FederationFolder.create(tmp_path / "others", (HOST, 443), ROOT, clock=lambda: NOW)
    site.install(federation.enrol(site.enrolment(federation.invite("ward-a")), HOST), NOW)
    record = SiteRecord("ward-a", site.identity().public.hex(), "pending", NOW)
    assert federation.words(record) == site.words() != other.words(record)


def test_a_retry_with_the_same_key_gets_the_same_certificate(
    federation: FederationFolder, site: SiteKeys, invitation: Invitation
) -> None:
    again = SiteKeys.join(site.folder, invitation)
    first = federation.enrol(site.enrolment(invitation), HOST)
    assert at(NOW + HOUR, federation).enrol(again.enrolment(invitation), HOST) == first
    site.install(first, NOW)
    assert len(federation.site("ward-a").certificates) == 1
    assert federation.alarms() == []


def test_a_second_use_with_another_key_is_refused_with_one_alarm(
    federation: FederationFolder,
    site: SiteKeys,
    invitation: Invitation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation.enrol(site.enrolment(invitation), HOST)
    thief = SiteKeys.join(tmp_path / "thief", invitation)
    for _ in range(2):
        with pytest.raises(IdentityError, match="used with another key"):
            at(NOW + 5, federation).enrol(thief.enrolment(invitation), "192.0.2.66")
    what = "its invitation was used with another key, from 192.0.2.66"
    assert federation.alarms() == [{"time": NOW + 5, "site": "ward-a", "what": what}]
    assert federation.site("ward-a").fingerprint == site.identity().fingerprint
    monkeypatch.setattr(federation_folder, "_MOST_STRANGERS", 2)
    for name in ("second", "third"):
        stranger = SiteKeys.join(tmp_path / name, invitation)
        with pytest.raises(IdentityError, match="used with another key"):
            federation.enrol(stranger.enrolment(invitation), HOST)
    assert len(federation.alarms()) == 2


def test_an_invitation_ends_after_72_hours(
    federation: FederationFolder, site: SiteKeys, invitation: Invitation
) -> None:
    end = NOW + 72 * HOUR
    assert at(end, federation).enrolling()
    assert not at(end + 1, federation).enrolling()
    assert Invitation.read(invitation.text(), end) == invitation
    with pytest.raises(IdentityError, match=r"expired on .* UTC; ask for a new invitation"):
        Invitation.read(invitation.text(), end + 1)
    with pytest.raises(IdentityError, match="the invitation expired"):
        at(end + 1, federation).enrol(site.enrolment(invitation), HOST)
    at(end, federation).enrol(site.enrolment(invitation), HOST)


def test_the_name_is_that_of_the_invitation(federation: FederationFolder, tmp_path: Path) -> None:
    invitation = federation.invite("ward-a")
    federation.invite("ward-b")
    renamed = SiteKeys.join(tmp_path / "b", replace(invitation, name="ward-b"))  # signs for another name
    with pytest.raises(IdentityError, match="signature is not valid"):
        federation.enrol(renamed.enrolment(invitation), HOST)
    site = SiteKeys.join(tmp_path / "a", invitation)
    named = json.dumps({**json.loads(site.enrolment(invitation)), "name": "ward-b"}).encode()
    with pytest.raises(IdentityError, match="it needs exactly: identity"):
        federation.enrol(named, HOST)
    assert federation.sites() == []
    site.install(federation.enrol(site.enrolment(invitation), HOST), NOW)
    assert site.certificate().name == "ward-a"


def test_requests_that_prove_nothing_are_refused(
    federation: FederationFolder, site: SiteKeys, invitation: Invitation
) -> None:
    good = json.loads(site.enrolment(invitation))
    one, other, root = KeyPair.make(), KeyPair.make(), federation.root
    forged = key_request(one, other, root, "ward-a")
    wrong: list[bytes] = [
        json.dumps({**good, key: value}).encode()
        for key, value in (
            ("secret", "AAAA"),
            ("proof", good["signature"]),
            ("tls", good["identity"]),
            ("tls", 3),
        )
    ]
    wrong += [
        b"",
        b"[]",
        b"{",
        b"[" * 10_000,
        b"\xff",
        site.renewal(),
        b" " * LARGEST_MESSAGE + site.enrolment(invitation),
    ]
    for values in (
        forged | {"identity": site.identity().public},
        forged | {"tls": site.identity().public},
        key_request(one, one, root, "ward-a"),
        key_request(one, other, b"another root", "ward-a"),
        forged | {"identity": one.public[:-1]},
        forged | {"identity": one.public + b"\0"},
        forged | {"signature": forged["signature"] + b"\0"},
    ):
        wrong.append(write_message(values | {"secret": invitation.secret}))
    for request in wrong:
        with pytest.raises(IdentityError) as caught:
            federation.enrol(request, HOST)
        assert good["secret"] not in str(caught.value)
    assert federation.sites() == []
    federation.enrol(site.enrolment(invitation), HOST)  # the invitation is not used up


def test_a_taken_name_needs_a_replacement_which_revokes_the_old_key(
    federation: FederationFolder, tmp_path: Path
) -> None:
    old = joined(federation, "ward-a", tmp_path)
    with pytest.raises(IdentityError, match="the name ward-a is taken; for a new machine pass --replace"):
        federation.invite("ward-a")
    invitation = federation.invite("ward-a", replaces=True)
    with pytest.raises(NotAdmitted, match="ward-a is revoked"):
        federation.admit(old.certificate())
    with pytest.raises(IdentityError, match="the key was used before, as ward-a"):
        federation.enrol(old.enrolment(invitation), HOST)
    new = SiteKeys.join(tmp_path / "new", federation.invite("ward-a", replaces=True))
    with pytest.raises(IdentityError, match="the invitation is not known here"):
        federation.enrol(new.enrolment(invitation), HOST)  # the second invitation replaced it
    invitation = federation.invite("ward-a", replaces=True)
    new.install(federation.enrol(new.enrolment(invitation), HOST), NOW)
    federation.accept("ward-a", new.identity().fingerprint)
    assert federation.admit(new.certificate()).former == [old.identity().fingerprint.hex()]
    with pytest.raises(NotAdmitted) as caught:
        federation.admit(old.certificate())
    assert caught.value.reason == "revoked"
    second = federation.invite("ward-b")
    for each in (old, new):
        with pytest.raises(IdentityError, match="the key was used before, as ward-a"):
            federation.enrol(write_message(as_ward_b(federation, each) | {"secret": second.secret}), HOST)


def as_ward_b(federation: FederationFolder, site: SiteKeys) -> dict[str, bytes]:
    return key_request(site.identity(), KeyPair.make(), federation.root, "ward-b")


def test_revocation_ends_invitations_too(
    federation: FederationFolder, site: SiteKeys, invitation: Invitation
) -> None:
    federation.revoke("ward-a")  # invited only
    with pytest.raises(IdentityError, match="the invitation is not known here"):
        federation.enrol(site.enrolment(invitation), HOST)
    with pytest.raises(IdentityError, match="has no site 'ward-a'"):
        federation.revoke("ward-a")
    with pytest.raises(IdentityError, match="has no site"):
        federation.revoke("../federation")
    invitation = federation.invite("ward-a")
    site.install(federation.enrol(site.enrolment(invitation), HOST), NOW)
    federation.revoke("ward-a", drop=True)
    assert federation.site("ward-a").drop
    with pytest.raises(IdentityError, match="the invitation is not known here"):
        federation.enrol(site.enrolment(invitation), HOST)
    with pytest.raises(IdentityError, match="revoked; invite a new one with --replace"):
        federation.accept("ward-a", site.identity().fingerprint)
    with pytest.raises(NotAdmitted):
        federation.renew(site.certificate(), site.renewal())


def test_a_site_is_suspended_until_the_operator_decides(federation: FederationFolder, tmp_path: Path) -> None:
    site = joined(federation, "ward-a", tmp_path)
    federation.suspend("ward-a", "two addresses")
    federation.suspend("ward-a", "two addresses")
    for call in (
        lambda: federation.admit(site.certificate()),
        lambda: federation.renew(site.certificate(), site.renewal()),
    ):
        with pytest.raises(NotAdmitted) as caught:
            call()
        assert caught.value.reason == "suspended"
    assert [alarm["what"] for alarm in federation.alarms()] == ["suspended: two addresses"]
    federation.accept("ward-a", site.identity().fingerprint)
    federation.admit(site.certificate())


def test_a_certificate_is_renewed_with_a_new_key_in_its_last_30_days(
    federation: FederationFolder, tmp_path: Path
) -> None:
    site = joined(federation, "ward-a", tmp_path)
    first = site.certificate()
    assert not site.renewal_due(NOW + 59 * DAY)
    later = NOW + 61 * DAY
    assert site.renewal_due(later)
    lost = at(later, federation).renew(first, site.renewal())
    assert (
        at(later, federation).renew(first, site.renewal()) == lost
    )  # its answer was lost: the same once more
    at(later, federation).admit(first)
    assert site.install(lost, later) == "accepted"
    second = site.certificate()
    assert (second.identity, second.not_after.timestamp()) == (first.identity, later + 90 * DAY)
    at(later + 89 * DAY, federation).admit(second)
    site.install(at(later + 61 * DAY, federation).renew(second, site.renewal()), later + 61 * DAY)
    with pytest.raises(NotAdmitted, match="not one of this server"):
        at(later, federation).admit(first)
    same = key_request(site.identity(), KeyPair.read(site.folder / "tls.pem"), federation.root, "ward-a")
    with pytest.raises(IdentityError, match="the TLS key that it should replace"):
        at(later + 61 * DAY, federation).renew(site.certificate(), write_message(same))
    thief = KeyPair.make()  # has the TLS key of the site, and not its identity key
    forged = key_request(thief, KeyPair.make(), federation.root, "ward-a") | {
        "identity": site.identity().public
    }
    with pytest.raises(IdentityError, match="a signature is not valid"):
        at(later + 61 * DAY, federation).renew(site.certificate(), write_message(forged))
    other = joined(federation, "ward-b", tmp_path)
    with pytest.raises(IdentityError, match="not signed by the key of ward-a"):
        at(later + 61 * DAY, federation).renew(site.certificate(), other.renewal())


def test_a_site_says_what_is_wrong_with_its_own_certificate(
    federation: FederationFolder, tmp_path: Path
) -> None:
    site = joined(federation, "ward-a", tmp_path)
    site.check_certificate(NOW)
    with pytest.raises(
        IdentityError, match=r"the certificate of ward-a expired on .* UTC; ask .* for: fedlens"
    ):
        site.check_certificate(NOW + 91 * DAY)
    with pytest.raises(IdentityError, match=r"and it is .* UTC here; set the clock"):
        site.check_certificate(NOW - 2 * HOUR)


def test_an_expired_site_comes_back_with_its_own_key_alone(
    federation: FederationFolder, tmp_path: Path
) -> None:
    site, late = joined(federation, "ward-a", tmp_path), NOW + 100 * DAY
    with pytest.raises(NotAdmitted, match="valid from"):
        at(late, federation).renew(site.certificate(), site.renewal())
    invitation = at(late, federation).invite("ward-a", same_key=True)
    thief = SiteKeys.join(tmp_path / "thief", invitation)
    with pytest.raises(IdentityError, match="used with another key"):
        at(late, federation).enrol(thief.enrolment(invitation), HOST)
    assert len(federation.alarms()) == 1
    assert SiteKeys.join(site.folder, invitation).install(
        at(late, federation).enrol(site.enrolment(invitation), HOST), late
    ) == ("accepted")
    at(late + 89 * DAY, federation).admit(site.certificate())
    with pytest.raises(IdentityError, match="ward-b has no key to keep"):
        at(late, federation).invite("ward-b", same_key=True)


def test_a_site_installs_only_its_own_certificate(
    federation: FederationFolder, invitation: Invitation, site: SiteKeys, tmp_path: Path
) -> None:
    answer = federation.enrol(site.enrolment(invitation), HOST)
    other = joined(federation, "ward-b", tmp_path)
    others = FederationFolder.create(tmp_path / "others", (HOST, 443), ROOT, clock=lambda: NOW)
    second = others.invite("ward-a")
    elsewhere = SiteKeys.join(tmp_path / "elsewhere", second)
    foreign = others.enrol(elsewhere.enrolment(second), HOST)
    own = federation.site("ward-b").certificates[0]["chain"].encode()
    tls = KeyPair.read(site.folder / "tls.next.pem").public
    forged = read_chain(issue(issuer_of(others), "ward-a", (site.identity().public, tls), NOW), "it")[:1]
    with pytest.raises(IdentityError, match="not signed by the authority"):
        site.install(write_message({"chain": pem([*forged, issuer_of(federation)[1]]), "state": ""}), NOW)
    cases = {
        "not for the key and the name": write_message({"chain": own, "state": "accepted"}),
        "not signed by the authority": foreign,
        "contains no certificates": write_message({"chain": b"", "state": "accepted"}),
        "is damaged: it is not JSON": b"<html>",
    }
    for text, wrong in cases.items():
        with pytest.raises(IdentityError, match=text):
            site.install(wrong, NOW)
    site.install(answer, NOW)
    with pytest.raises(IdentityError, match="has the keys of ward-b in the federation hospitals"):
        SiteKeys.join(other.folder, invitation)
    with pytest.raises(IdentityError, match="take another folder"):
        SiteKeys.join(site.folder, second)


@pytest.mark.parametrize(
    "name", ["", "Ward", "ward a", "../a", "a" * 64, "-a", "server", "ward.a", "wärd", "a\n", "issuer-3"]
)
def test_names_are_plain(federation: FederationFolder, name: str) -> None:
    with pytest.raises(IdentityError, match="is not a name"):
        federation.invite(name)
    text = replace(federation.invite("ward-a"), name=name).text()
    with pytest.raises(IdentityError, match="is not a name"):
        Invitation.read(text, NOW)
