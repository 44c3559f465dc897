"""The server's folder of a federation: its keys, its sites and their states, invitations and alarms."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any

from fedlens.base.errors import IdentityError, nearest
from fedlens.base.parse_text import parse_json
from fedlens.base.shell_command import shell_command
from fedlens.files import jsonl
from fedlens.files.atomic_files import make_folder, temporary_beside
from fedlens.identity import authority
from fedlens.identity.authority import DAY, HOUR, certificates, day, der, pem
from fedlens.identity.fingerprint import fingerprint_words
from fedlens.identity.invitation import Invitation
from fedlens.identity.keys import KeyPair, fingerprint_of
from fedlens.identity.plain_message import read_message, write_message
from fedlens.identity.private_files import one_writer, private_folder, read_private, write_private
from fedlens.identity.signing import KEY_REQUEST, LEFT, NOTICE, check_key_request, verify
from fedlens.identity.tls import Peer, issuer_number, peer_of

Clock = Callable[[], float]
INVITATION_LASTS = 72 * HOUR
RENEWS_WITHIN = 30 * DAY
"""A certificate is renewed when it ends within this time."""
ROTATES_WITHIN = 60 * DAY
"""The operator is told to rotate the issuer when it ends within this time."""
_ABOUT: dict[str, type] = {"federation": str, "host": str, "port": int}
_MOST_STRANGERS = 16  # other keys that are kept, and raise an alarm, of one invitation


class NotAdmitted(IdentityError):
    """A site that may not send or receive.

    Attributes:
        reason: "unknown", "expired", "pending", "suspended" or "revoked", which the site may be told.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, hint="ask the operator of the federation")
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:  # the base class would leave the reason out
        return (type(self), (self.what, self.reason))


@dataclass(frozen=True)
class SiteRecord:
    """What the server keeps of a site.

    Attributes:
        name: the name that the operator chose.
        identity: the public identity key in DER, hexadecimal.
        state: "pending", "accepted", "suspended" or "revoked".
        since: when the state began, in seconds since 1970.
        certificates: the last two certificates: of a renewal whose answer was lost, the site still uses the first.
            Each has `tls` (the key's SHA-256), `sha256` (of the certificate) and `chain` (PEM).
        former: fingerprints of keys that were revoked under this name, hexadecimal.
        reason: why it was suspended.
        drop: whether answers that were accepted before a revocation are to be dropped.
        left: when it said that it has left, in seconds since 1970; 0 if it takes part.
    """

    name: str
    identity: str
    state: str
    since: float
    certificates: list[dict[str, str]] = field(default_factory=list)
    former: list[str] = field(default_factory=list)
    reason: str = ""
    drop: bool = False
    left: float = 0.0

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of the identity key, 32 bytes."""
        return fingerprint_of(bytes.fromhex(self.identity))


class FederationFolder:
    """A federation as the server and its operator see it: `federation.json`, keys, `sites/`, `invitations/`, alarms.

    Another process may change the folder at any time: each call reads it anew, and changes wait for one another.

    Args:
        folder: made by `create`.
        passphrase: of the server's keys, if they are encrypted.
        clock: returns seconds since 1970.

    Attributes:
        name, host, port: those of `create`.

    Raises `IdentityError` if it is not the folder of a federation, or open to other users.
    """

    def __init__(self, folder: Path, passphrase: bytes | None = None, clock: Clock = time) -> None:
        if not (folder / "federation.json").exists():
            hint = "name it, or make one with 'fedlens federation create'"
            raise IdentityError(f"{folder} is not the folder of a federation", hint=hint)
        self.folder, self._passphrase, self._clock = private_folder(folder), passphrase, clock
        about = read_message(read_private(folder / "federation.json"), _ABOUT, "federation.json")
        self.name, self.host, self.port = str(about["federation"]), str(about["host"]), int(about["port"])

    @classmethod
    def create(
        cls,
        folder: Path,
        place: tuple[str, int],
        root: bytes | None,
        own: bytes | None = None,
        clock: Clock = time,
    ) -> FederationFolder:
        """Makes a federation with its root, or, without a passphrase for it, one that waits for a root elsewhere.

        In the second case carry `request_issuer()` to the other machine, call `authority.make_root` and `sign_issuer`
        there, and bring the result to `install_issuer`.

        Args:
            folder: a new folder. Its name becomes the name of the federation.
            place: host name or address of the server, and its port.
            root: the passphrase of the root's key, which is in `root/`.
            own: the passphrase of the server's keys; they are not encrypted without one.
            clock: returns seconds since 1970.

        Raises `IdentityError` for a folder that exists, and an invalid name or host.
        """
        if folder.exists() or folder.is_symlink():
            raise IdentityError(f"{folder} exists already", hint="take another name")
        authority.check_name(folder.name)
        authority.host_name(place[0])
        about: dict[str, str | int | bytes] = {"federation": folder.name, "host": place[0], "port": place[1]}
        make_folder(folder.parent)
        beside = temporary_beside(folder)
        try:
            for path in (beside, beside / "sites", beside / "invitations"):
                private_folder(path)
            write_private(beside / "alarms.jsonl", b"")  # made here for its mode; lines are appended
            write_private(beside / "federation.json", write_message(about))
            if root is not None:
                authority.make_root(beside / "root", folder.name, root, clock())
                cls(beside, own, clock).rotate(root)
            beside.rename(folder)  # which fails if someone has made a federation there meanwhile
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return cls(folder, own, clock)

    @property
    def root(self) -> bytes:
        """The root certificate in DER. Raises `IdentityError` if the root has not signed an issuer yet."""
        if not (self.folder / "root.pem").exists():
            raise IdentityError(f"{self.name} has no root yet", hint="sign its request where the root is")
        return der(certificates(self.folder / "root.pem")[0])

    # -- the server's own keys --

    def rotate(self, root_passphrase: bytes) -> None:
        """Makes a new issuer and new keys of the server, signed by the root in `root/`. Raises `IdentityError`."""
        if not (self.folder / "root" / "root.pem").exists():
            raise IdentityError(f"the root of {self.name} is not here", hint="sign a request where it is")
        request = self.request_issuer()
        signed = authority.sign_issuer(self.folder / "root", request, root_passphrase, self._clock())
        self.install_issuer(signed)

    def request_issuer(self) -> bytes:
        """Makes the key of the next issuer, and returns the request that `sign_issuer` of the root needs."""
        with one_writer(self.folder):
            key = KeyPair.make()
            write_private(self.folder / "issuer.next.pem", key.pem(self._passphrase))
            return write_message({"federation": self.name, "public": key.public, "above": self.issuer()[0]})

    def install_issuer(self, signed: bytes) -> None:
        """Installs what `sign_issuer` returned, with a new identity key and a new certificate of the server.

        Raises `IdentityError` if it is not for the last request, of another root, or not newer.
        """
        chain, path = authority.read_chain(signed, "the signed issuer"), self.folder / "issuer.next.pem"
        with one_writer(self.folder):
            if not path.exists():
                raise IdentityError(f"{self.name} waits for no issuer", hint="make a request for one first")
            if (self.folder / "root.pem").exists() and der(chain[-1]) != self.root:
                raise IdentityError(f"the signed issuer is of another root than that of {self.name}")
            number = authority.check_issuer(chain[0], chain[-1], self._clock())
            key = KeyPair.read(path, self._passphrase)
            if chain[0].public_key() != key.key.public_key() or number <= self.issuer()[0]:
                raise IdentityError("the signed issuer does not fit the last request", hint="sign that one")
            write_private(self.folder / "root.pem", pem(chain[-1:]))
            write_private(self.folder / "issuer.pem", key.pem(self._passphrase) + pem(chain[:1]))
            # After the issuer: sites accept another identity of the server only with a higher issuer.
            write_private(self.folder / "identity.pem", KeyPair.make().pem(self._passphrase))
            path.unlink()  # its key is in issuer.pem
        self.renew_server()

    def renew_server(self) -> bool:
        """Makes a new TLS key and certificate of the server if the last is due; returns whether it did.

        It is due in its last 30 days, and after a rotation. Load it into the context of the running server then.
        """
        path, identity = self.folder / "server.pem", self.identity()
        with one_writer(self.folder):
            number, ends = self.issuer()
            if path.exists():
                last = peer_of(der(certificates(path)[0]))
                same = (last.issuer, last.identity) == (number, identity.public)
                # The issuer's own end limits every certificate: a new one would not last longer.
                if same and not self._clock() + RENEWS_WITHIN > last.not_after.timestamp() < ends:
                    return False
            tls = KeyPair.make()
            chain = self._issue("server", (identity.public, tls.public), self.host)
            write_private(path, tls.pem(self._passphrase) + chain)
        return True

    def identity(self) -> KeyPair:
        """The key that signs the server's messages, read from its file: keep it. A rotation replaces it."""
        return KeyPair.read(self.folder / "identity.pem", self._passphrase)

    def warnings(self) -> list[str]:
        """What the operator must do soon, in sentences: from 60 days before the issuer ends."""
        number, ends = self.issuer()
        due = (
            f"issuer {number} ends on {day(ends)}; run: {shell_command('federation', 'rotate', self.folder)}"
        )
        return [due] if number and ends - self._clock() <= ROTATES_WITHIN else []

    # -- invitations and sites, for the operator --

    def invite(self, name: str, replaces: bool = False, same_key: bool = False) -> Invitation:
        """A new invitation, valid for 72 hours, in place of an earlier one for this name.

        Args:
            name: the site's name: lower-case letters, digits and hyphens.
            replaces: for a new machine under a name that is taken. The old key is revoked at once.
            same_key: for a site whose certificate expired: only its own identity key can use the invitation, and the
                site keeps its state.

        Raises `IdentityError` for an invalid or a taken name.
        """
        authority.check_name(name)
        secret, root = secrets.token_bytes(32), self.root
        with one_writer(self.folder):
            record = self._record(name)
            if record and not (replaces or same_key):
                hint = "for a new machine pass --replace, which revokes the old key"
                raise IdentityError(f"the name {name} is taken", hint=hint)
            if same_key and (record is None or record.state == "revoked"):
                raise IdentityError(f"{name} has no key to keep", hint="invite it without --same-key")
            if record and not same_key:
                self._keep(replace(record, state="revoked", since=self._clock()))
            key = record.fingerprint.hex() if record and same_key else None
            expires = int(self._clock() + INVITATION_LASTS)
            for each in self._invitations():
                # An old one is only for the message of a late site.
                if each["expires"] + 10 * INVITATION_LASTS < self._clock():
                    (self.folder / "invitations" / f"{each['name']}.json").unlink()
            about = {"name": name, "secret": _hash(secret), "expires": expires, "key": key, "others": []}
            self._write(f"invitations/{name}.json", about)
        return Invitation(self.name, self.host, self.port, root, name, secret, expires)

    def enrolling(self) -> bool:
        """Whether an invitation is open, so that /enrol answers."""
        return any(invitation["expires"] >= self._clock() for invitation in self._invitations())

    def invited(self) -> dict[str, float]:
        """When the invitations end that are open and not used yet, in seconds since 1970, by the names of the sites."""
        unused = [each for each in self._invitations() if each["key"] is None]
        return {each["name"]: each["expires"] for each in unused if each["expires"] >= self._clock()}

    def sites(self) -> list[SiteRecord]:
        """All sites, by name."""
        names = sorted(path.stem for path in (self.folder / "sites").glob("*.json"))
        return [record for record in map(self._record, names) if record]

    def site(self, name: str) -> SiteRecord:
        """The record of a site. Raises `IdentityError` for an unknown name."""
        record = self._record(name)
        if record is None:
            hint = nearest(name, [each.name for each in self.sites()])
            raise IdentityError(f"{self.name} has no site {name!r}", hint=hint)
        return record

    def words(self, record: SiteRecord) -> str:
        """The eight words of a site, to compare with those that the site shows."""
        return fingerprint_words(self.root, record.fingerprint)

    def accept(self, name: str, fingerprint: bytes) -> None:
        """Accepts a pending or suspended site, after people have compared its words.

        Args:
            name: the site.
            fingerprint: that of the record whose words were compared, in case another key came in between.
        """
        with one_writer(self.folder):
            record = self.site(name)
            if record.state == "revoked":
                raise IdentityError(f"the key of {name} is revoked", hint="invite a new one with --replace")
            if record.fingerprint != fingerprint:
                raise IdentityError(f"{name} has another key now", hint="compare the words again")
            self._keep(replace(record, state="accepted", since=self._clock(), reason=""))

    def revoke(self, name: str, drop: bool = False) -> None:
        """Revokes all keys of a site, and its open invitation; `drop` marks its accepted answers for removal."""
        with one_writer(self.folder):
            record, invitation = self._record(name), self.folder / "invitations" / f"{name}.json"
            if record or not authority.NAME.fullmatch(name) or not invitation.exists():
                self._keep(replace(self.site(name), state="revoked", since=self._clock(), drop=drop))
            invitation.unlink(missing_ok=True)

    def suspend(self, name: str, reason: str) -> None:
        """Suspends an accepted site until the operator accepts or revokes it, and raises an alarm."""
        with one_writer(self.folder):
            record = self.site(name)
            if record.state == "accepted":
                self._keep(replace(record, state="suspended", since=self._clock(), reason=reason))
                self._alarm(name, f"suspended: {reason}")

    def alarms(self) -> list[dict[str, Any]]:
        """All alarms: `time`, `site` and `what` of each."""
        return jsonl.read(self.folder / "alarms.jsonl")

    # -- requests of sites --

    def admit(self, peer: Peer) -> SiteRecord:
        """The record of an accepted site. Call it for every request, and again when a body has ended.

        Raises `NotAdmitted` with the reason: a certificate that has expired, that this server did not issue (a stolen
        issuer's, say) or that was replaced, and a site that is pending, suspended or revoked.
        """
        record = self._known(peer)
        if record.state != "accepted":
            raise NotAdmitted(f"{record.name} is {record.state}", record.state)
        return record

    def refusal(self, peer: Peer) -> str | None:
        """Why a site is not served, as `NotAdmitted.reason`; None if it is accepted."""
        try:
            self.admit(peer)
        except NotAdmitted as error:
            return error.reason
        return None

    def enrol(self, request: bytes, address: str) -> bytes:
        """Answers a request to enrol: a certificate for a pending site, the same one again if the site asks again.

        The name is that of the invitation. A second use with another key is refused and raises an alarm.

        Args:
            request: JSON of at most 16 KB, made by `SiteKeys.enrolment`.
            address: where it came from, for the alarm.

        Raises `IdentityError`, whose text contains no secret.
        """
        values = read_message(request, {**KEY_REQUEST, "secret": bytes}, "the request")
        hashed, key = _hash(values["secret"]), fingerprint_of(values["identity"]).hex()
        with one_writer(self.folder):
            invited = [each for each in self._invitations() if hmac.compare_digest(each["secret"], hashed)]
            if not invited or self._clock() > invited[0]["expires"]:
                what = f"expired on {day(invited[0]['expires'])}" if invited else "is not known here"
                raise IdentityError(f"the invitation {what}", hint="ask for a new invitation")
            (invitation,) = invited
            check_key_request(values, self.root, invitation["name"])
            if invitation["key"] not in (None, key):
                self._second_use(invitation, key, address)
            record = self._enrolled(invitation["name"], values["identity"])
            # First the invitation: after a crash between the two no other key can use it.
            self._write(f"invitations/{record.name}.json", {**invitation, "key": key})
            return self._answer(record, values["tls"])

    def renew(self, peer: Peer, request: bytes) -> bytes:
        """Answers a request to renew a certificate with a new TLS key, signed by the same identity key.

        Raises `NotAdmitted` for a site that is revoked or suspended, `IdentityError` for a wrong request.
        """
        values = read_message(request, KEY_REQUEST, "the request")
        with one_writer(self.folder):
            record = self._known(peer)
            if record.state == "suspended":
                raise NotAdmitted(f"{record.name} is suspended", record.state)
            if values["identity"].hex() != record.identity:
                raise IdentityError(f"the request is not signed by the key of {record.name}")
            check_key_request(values, self.root, record.name)
            # First the certificate that is in use: it is kept beside the new one.
            own = sorted(record.certificates, key=lambda each: each["sha256"] != peer.certificate)
            if own[0]["tls"] == fingerprint_of(values["tls"]).hex():
                raise IdentityError("the request has the TLS key that it should replace")
            return self._answer(replace(record, certificates=own), values["tls"])

    def leave(self, peer: Peer, notice: bytes) -> bytes:
        """Notes that a site has left, if its identity key has signed that within the last hour; returns no byte.

        It stays accepted, and may come back. Raises `IdentityError` for another notice.
        """
        values, now = read_message(notice, NOTICE, "the notice"), self._clock()
        if not now - HOUR < values["time"] < now + HOUR:
            raise IdentityError(
                "the notice that the site has left is not of this hour", hint="compare the clocks"
            )
        fields = [hashlib.sha256(self.root).digest(), peer.name, values["time"]]
        verify(peer.identity, LEFT, fields, values["signature"])
        self.note_left(peer.name, now)
        return b""

    def note_left(self, name: str, left: float) -> None:
        """Notes when a site has left first; 0 for one that asks for work again."""
        if bool(self.site(name).left) != bool(left):
            with one_writer(self.folder):
                self._keep(replace(self.site(name), left=left))

    def _known(self, peer: Peer) -> SiteRecord:
        """The record of a peer that is not revoked, whose certificate is valid and was issued here."""
        record = self._record(peer.name)
        if record is None:
            raise NotAdmitted("the federation has no such site", "unknown")
        if record.state == "revoked" or peer.fingerprint.hex() in record.former:
            raise NotAdmitted(f"{record.name} is revoked", "revoked")
        issued = [each["sha256"] for each in record.certificates]
        if peer.certificate not in issued or peer.identity.hex() != record.identity:
            raise NotAdmitted(f"the certificate of {record.name} is not one of this server", "unknown")
        if not peer.not_before.timestamp() <= self._clock() <= peer.not_after.timestamp():
            valid = f"{day(peer.not_before)} to {day(peer.not_after)}"
            raise NotAdmitted(f"the certificate of {record.name} is valid from {valid}", "expired")
        return record

    def _enrolled(self, name: str, identity: bytes) -> SiteRecord:
        """The record that an invitation leads to: a new one, or that of the same key."""
        record, key = self._record(name), fingerprint_of(identity)
        for each in self.sites():
            kept = each.name == name and each.state != "revoked"
            if key.hex() in each.former or (key == each.fingerprint and not kept):
                raise IdentityError(f"the key was used before, as {each.name}", hint="join in a new folder")
        if record and record.fingerprint == key:
            return record
        former = [*record.former, record.fingerprint.hex()] if record else []
        return SiteRecord(name, identity.hex(), "pending", self._clock(), former=former)

    def _answer(self, record: SiteRecord, tls: bytes) -> bytes:
        """Keeps the record with a certificate for the key, and returns it; one that it has stays as it is."""
        key = fingerprint_of(tls).hex()
        own = [each for each in record.certificates if each["tls"] == key]
        if not own:
            chain = self._issue(record.name, (bytes.fromhex(record.identity), tls))
            sha256 = peer_of(der(authority.read_chain(chain, "the certificate")[0])).certificate
            own = [{"tls": key, "sha256": sha256, "chain": chain.decode()}]
            record = replace(record, certificates=[*record.certificates[:1], *own])
        self._keep(record)
        return write_message({"chain": own[0]["chain"].encode(), "state": record.state})

    def _second_use(self, invitation: dict[str, Any], key: str, address: str) -> None:
        name = invitation["name"]
        if key not in invitation["others"] and len(invitation["others"]) < _MOST_STRANGERS:
            self._alarm(name, f"its invitation was used with another key, from {address}")
            self._write(f"invitations/{name}.json", {**invitation, "others": [*invitation["others"], key]})
        raise IdentityError("the invitation was used with another key", hint="ask for a new invitation")

    def _issue(self, name: str, keys: tuple[bytes, bytes], host: str = "") -> bytes:
        path = self.folder / "issuer.pem"
        issuer = KeyPair.read(path, self._passphrase), certificates(path)[0]
        return authority.issue(issuer, name, keys, self._clock(), host)

    def issuer(self) -> tuple[int, float]:
        """The number of the issuer and when it ends; 0 and 0 before the first."""
        if not (self.folder / "issuer.pem").exists():
            return 0, 0.0
        issuer = certificates(self.folder / "issuer.pem")[0]
        return issuer_number(issuer.subject), authority.not_after(issuer)

    def _record(self, name: str) -> SiteRecord | None:
        if not authority.NAME.fullmatch(name):  # a name of a stranger never becomes a path
            return None
        path = self.folder / "sites" / f"{name}.json"
        return SiteRecord(**self._read(path)) if path.exists() else None

    def _keep(self, record: SiteRecord) -> None:
        self._write(f"sites/{record.name}.json", asdict(record))

    def _invitations(self) -> list[dict[str, Any]]:
        return [self._read(path) for path in (self.folder / "invitations").glob("*.json")]

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            return dict(parse_json(read_private(path)))
        except (TypeError, ValueError) as error:
            raise IdentityError(f"{path.name} is damaged: {error}", where=str(path)) from error

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_private(self.folder / name, json.dumps(content, sort_keys=True).encode())

    def _alarm(self, name: str, what: str) -> None:
        jsonl.append(self.folder / "alarms.jsonl", [{"time": self._clock(), "site": name, "what": what}])


def _hash(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()
