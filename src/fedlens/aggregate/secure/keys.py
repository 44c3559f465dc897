"""Keys of one attempt at a secure sum: X25519, HKDF-SHA256 and AES-256-GCM, bound to all that its members agree on."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedlens.core.types import ClientId
from fedlens.files.model_digest import raw

if TYPE_CHECKING:  # only secure sums need the package
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey as PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PROTOCOL = "fedlens secagg 1"
KEY_BYTES = 32  # of a public key, a private key, a seed and a nonce
SURVIVORS = 3  # of two, each would read the other's vector
_GCM_NONCE = 12
SEALING = _GCM_NONCE + 16  # the bytes that sealing adds: the nonce, and the tag


class SecureSumRefused(Exception):
    """What a client, or a server, does not accept in a secure sum, with the reason."""


def digest(value: Any) -> bytes:
    """SHA-256 of a payload: of its names, plain values, and the dtypes, shapes and bytes of its tensors.

    Equal payloads have equal digests, whatever their device, strides, and order of names.

    >>> digest({"lr": 0.1, "w": [1, 2]}) == digest({"w": [1, 2], "lr": 0.1}) != digest({"w": [1, 3], "lr": 0.1})
    True
    """
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            hashed.update(f"tensor {value.dtype} {list(value.shape)}\n".encode())
            hashed.update(raw(value))
        elif isinstance(value, Mapping):
            hashed.update(f"mapping {json.dumps(sorted(value))}\n".encode())
            for name in sorted(value):
                add(value[name])
        elif isinstance(value, list | tuple):
            hashed.update(f"list {len(value)}\n".encode())
            for item in value:
                add(item)
        else:
            # A number of NumPy is sent as one of Python.
            value = float(value) if isinstance(value, float) else value
            hashed.update(f"{type(value).__name__} {value!r}\n".encode())

    add(value)
    return hashed.digest()


@dataclass(frozen=True)
class Terms:
    """What the settings fix for every attempt, at the server and at each client by itself.

    Attributes:
        threshold: the fraction of the asked cohort that must last, above 0.5.
        layout: the fields, ranges, bits and words of a vector, as text.
        operation: the training, as text.
        contract: SHA-256 of the experiment that the sites approved; empty in a simulation, in which nothing is signed.
    """

    threshold: float
    layout: str
    operation: str
    contract: str = ""

    def needed(self, cohort: int) -> int:
        """ceil(threshold x cohort), exact in the decimal digits of the threshold, and at least 3.

        >>> Terms(0.55, "", "").needed(100), Terms(0.51, "", "").needed(3)
        (55, 3)
        """
        exact = Decimal(repr(self.threshold)) * cohort
        return max(SURVIVORS, int(exact.to_integral_value(ROUND_CEILING)))

    def shares(self, cohort: int) -> int:
        """How many shares give a secret: here those of all that must last."""
        return self.needed(cohort)

    def near(
        self, members: Sequence[ClientId], cohort: Sequence[ClientId], seed: bytes
    ) -> Mapping[ClientId, Sequence[ClientId]]:
        """With whom each member exchanges shares and masks, itself included, in the order of the members: with all.

        Args:
            cohort: all that were asked for keys.
            seed: a hash of what all members have published.
        """
        return dict.fromkeys(members, members)


def helpers(cohort: int, needed: int) -> int:
    """How many clients of a cohort may work with an active server: the largest c with 2t > n + c.

    >>> helpers(4, 3), helpers(5, 3)
    (1, 0)
    """
    return max(0, 2 * needed - cohort - 1)


@dataclass(frozen=True)
class Attempt:
    """One attempt at the secure sum of a round, as the server announces it.

    Attributes:
        run: the id of the run.
        round, number: the round, and which attempt at it; later ones have larger numbers.
        nonce: 16 random bytes of the server.
        cohort: all clients that are asked.
        model, shared: SHA-256 of the model, and of all that the clients train with.
    """

    run: str
    round: int
    number: int
    nonce: bytes
    cohort: tuple[ClientId, ...]
    model: bytes
    shared: bytes

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Attempt:
        """The attempt that a payload announces. Raises `SecureSumRefused` for one of other types, or a wrong cohort."""
        attempt = cls(**{**payload, "cohort": tuple(payload["cohort"])})
        kinds = [type(attempt.round), type(attempt.number), type(attempt.run), type(attempt.nonce)]
        if kinds != [int, int, str, bytes] or "/" in attempt.run:  # not NaN, which no comparison refuses
            raise SecureSumRefused("the attempt is not announced by numbers, a name and a nonce")
        if len(set(attempt.cohort)) != len(attempt.cohort) or len(attempt.cohort) < SURVIVORS:
            raise SecureSumRefused(
                f"the cohort must be {SURVIVORS} or more different clients, and is {list(attempt.cohort)}"
            )
        return attempt

    @property
    def payload(self) -> dict[str, Any]:
        """The attempt as plain values, of which `of` makes it again."""
        return {f.name: vars(self)[f.name] for f in fields(self)} | {"cohort": list(self.cohort)}

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of all that the server announced."""
        return digest(self.payload)

    @property
    def secrets(self) -> str:
        """The start of the names of a client's secrets for this attempt."""
        return f"{of_run(self.run)}{self.number}/{self.round}/{self.nonce.hex()}/"


def of_run(run: str) -> str:
    """The start of the names of a client's secrets for this run."""
    return f"secagg/{run}/"


@dataclass(frozen=True)
class Member:
    """What a client publishes for one attempt: 32 bytes each of two public keys, and half of its nonce.

    Attributes:
        sealing: the public key for the shares that others send it.
        masking: the public key for the masks that it has in common with others.
        nonce: 16 random bytes of the client; the server's are the other half.
    """

    sealing: bytes
    masking: bytes
    nonce: bytes

    BYTES = 2 * KEY_BYTES + 16

    @classmethod
    def of(cls, data: bytes) -> Member:
        """The member whose `bytes` these are."""
        return cls(data[:KEY_BYTES], data[KEY_BYTES : 2 * KEY_BYTES], data[2 * KEY_BYTES :])

    def __bytes__(self) -> bytes:
        return self.sealing + self.masking + self.nonce


@dataclass(frozen=True)
class Transcript:
    """An attempt with the keys of its members: the context of each key that is derived from it.

    Raises `SecureSumRefused` for too few members, strangers to the cohort, and keys that occur twice.
    """

    terms: Terms
    attempt: Attempt
    members: Mapping[ClientId, Member]

    def __post_init__(self) -> None:
        subset("senders of keys", list(self.members), self.attempt.cohort, self.needed)
        published = [key for member in self.members.values() for key in (member.sealing, member.masking)]
        if len(set(published)) != len(published):
            raise SecureSumRefused("two public keys of the round are equal")

    @classmethod
    def of(cls, terms: Terms, payload: Mapping[str, Any]) -> Transcript:
        """The transcript whose `payload` this is."""
        members = map(Member.of, pieces(payload["keys"], Member.BYTES))
        return cls(terms, Attempt.of(payload["attempt"]), dict(zip(payload["members"], members, strict=True)))

    @property
    def payload(self) -> dict[str, Any]:
        """The attempt, its members and their keys, as plain values."""
        keys = b"".join(map(bytes, self.members.values()))
        return {"attempt": self.attempt.payload, "members": list(self.members), "keys": keys}

    @property
    def needed(self) -> int:
        """How many clients must last."""
        return self.terms.needed(len(self.attempt.cohort))

    @property
    def shares(self) -> int:
        """How many shares give a secret."""
        return self.terms.shares(len(self.attempt.cohort))

    @cached_property
    def near(self) -> Mapping[ClientId, Sequence[ClientId]]:
        """With whom each member exchanges shares and masks, itself included."""
        return self.terms.near(list(self.members), self.attempt.cohort, self.hash)

    def among(self, client: ClientId, others: Collection[ClientId]) -> list[ClientId]:
        """Those of `others` with whom a client exchanges shares and masks, itself included."""
        return [other for other in self.near[client] if other in others]

    @cached_property
    def text(self) -> bytes:
        """The transcript, which whoever opens a sealed text must have as its sender had it."""
        agreed = [PROTOCOL, self.payload, vars(self.terms), self.needed]
        return json.dumps(agreed, sort_keys=True, default=bytes.hex).encode()

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of `text`."""
        return hashlib.sha256(self.text).digest()

    @cached_property
    def points(self) -> Mapping[ClientId, int]:
        """Where the shares for a client are taken: its place among the members, from 1."""
        return {client: place for place, client in enumerate(self.members, 1)}

    def derive(self, secret: bytes, purpose: str, *clients: ClientId) -> bytes:
        """32 bytes by HKDF-SHA256 from a secret, for one purpose and these clients: sender and receiver, or a pair."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        context = json.dumps([purpose, *clients]).encode() + self.hash
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=context).derive(secret)

    def commitment(self, client: ClientId, seed: bytes) -> bytes:
        """H(b_u): what a client announces of the seed of its own mask."""
        return self.derive(seed, "commitment", client)

    def own_mask(self, client: ClientId, seed: bytes) -> bytes:
        """The key of the mask that a client makes of its seed."""
        return self.derive(seed, "own mask", client)

    def common_mask(self, private: PrivateKey, client: ClientId, other: ClientId) -> tuple[bytes, int]:
        """The key of the mask of two clients, from the private key of the first, and the sign with which it adds it."""
        first, second = sorted((client, other), key=self.points.__getitem__)
        secret = agreed(private, self.members[other].masking)
        return self.derive(secret, "common mask", first, second), 1 if client == first else -1

    def seal(
        self, private: PrivateKey, sender: ClientId, receiver: ClientId, nonce: bytes, text: bytes
    ) -> bytes:
        """A text that only the receiver can open, and that only the sender can have sealed."""
        cipher = self._cipher(private, self.members[receiver], sender, receiver)
        return nonce + cipher.encrypt(nonce, text, self.text)

    def open(self, private: PrivateKey, sender: ClientId, receiver: ClientId, sealed: bytes) -> bytes:
        """The text that the sender sealed. Raises `SecureSumRefused` if it is forged, or of another attempt."""
        from cryptography.exceptions import InvalidTag

        cipher = self._cipher(private, self.members[sender], sender, receiver)
        try:
            return cipher.decrypt(sealed[:_GCM_NONCE], sealed[_GCM_NONCE:], self.text)
        except InvalidTag:
            raise SecureSumRefused(f"what client {sender} sealed for client {receiver} is forged") from None

    def _cipher(self, private: PrivateKey, other: Member, sender: ClientId, receiver: ClientId) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self.derive(agreed(private, other.sealing), "sealing", sender, receiver))


def pieces(data: bytes, size: int) -> list[bytes]:
    """Bytes in pieces of one size.

    >>> pieces(b"abcd", 2)
    [b'ab', b'cd']
    """
    return [data[at : at + size] for at in range(0, len(data), size)]


def subset(what: str, later: Sequence[ClientId], earlier: Sequence[ClientId], needed: int) -> None:
    """Raises `SecureSumRefused` if a later set is not a subset of the earlier one in its order, or too small."""
    places = {client: place for place, client in enumerate(earlier)}
    order = [places.get(client, -1) for client in later]
    if -1 in order or order != sorted(set(order)):
        raise SecureSumRefused(f"the {what} are not a subset of the clients of the step before")
    if len(later) < needed:
        raise SecureSumRefused(
            f"there are {len(later)} {what} of {len(earlier)} clients, and {needed} must last"
        )


def private_key(secret: bytes) -> PrivateKey:
    """The private X25519 key that 32 random bytes give."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public(private: PrivateKey) -> bytes:
    """The 32 bytes of a private key's public key."""
    return private.public_key().public_bytes_raw()


def agreed(private: PrivateKey, other: bytes) -> bytes:
    """The secret of a private key and another's public key. Raises `SecureSumRefused` for a point of small order."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SecureSumRefused("a public key is a point of small order") from None


def same(one: bytes, other: bytes) -> bool:
    """Whether two secrets, or hashes of secrets, are equal, in a time that does not depend on them."""
    return hmac.compare_digest(one, other)
