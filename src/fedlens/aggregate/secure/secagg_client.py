"""The client's side of SecAgg (Bonawitz et al. 2017, ePrint 2017/281, figure 4): its operations, and what it refuses.

Each operation is a function of what the server sends, of the client's secrets, and of its log, which the client keeps
for ever. The log has the attempt in progress of each run, and the SHA-256 of every model that was in an opened sum.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fedlens.aggregate.secure import keys, shamir
from fedlens.aggregate.secure.encoded_train import EncodedTrain
from fedlens.aggregate.secure.encoding import VECTOR
from fedlens.aggregate.secure.masks import Words, add_masks
from fedlens.core.calls import Calls
from fedlens.core.protocol import Call, Client, Id, Obstacle, Outcome, Payload
from fedlens.core.random import Rng, random_state_kept
from fedlens.core.types import ClientId

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey as PrivateKey

ATTEMPT, OWN = "secagg", "sealed"  # the names of what every ask holds, and of what it holds for one client
_OWN_NAMES = (ATTEMPT, OWN, "log", "work")  # of a payload, besides what all clients train with
_PLACES = struct.Struct(">II")  # sender and receiver, as the points of their shares
SEALING_BYTES = keys.SEALING + _PLACES.size  # beside what is sealed
SEALED_BYTES = SEALING_BYTES + 2 * shamir.SHARE_BYTES
_HOUR = 3600.0
# The last step that a client answered.
KEYED, _SHARES, TRAINED, _AGREED, _UNMASKED = "keys", "shares", "masked", "agreed", "unmasked"


def as_tensor(data: bytes) -> Tensor:
    """Bytes as uint8 [n], which a schema can check."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor.

    >>> as_bytes(as_tensor(b"abcd"))
    b'abcd'
    """
    return bytes(tensor.cpu().numpy().tobytes())


@dataclass(frozen=True)
class AttemptStep:
    """An attempt at a client: its log, what the log has of the attempt, and the secrets."""

    log: Payload
    entry: Mapping[str, Any]
    attempt: keys.Attempt
    client: Client
    masks: Sequence[tuple[bytes, int]] = ()  # keys and signs, read before the training, which may take long

    def secret(self, purpose: str, length: int = keys.KEY_BYTES) -> bytes:
        """A secret of this attempt."""
        return self.client.secrets.token(self.attempt.secrets + purpose, length)

    @cached_property
    def sealing(self) -> PrivateKey:
        """The private key for the shares that others send."""
        return keys.private_key(self.secret("sealing"))

    @cached_property
    def masking(self) -> PrivateKey:
        """The private key for the masks in common with others."""
        return keys.private_key(self.secret("masking"))

    def member(self) -> keys.Member:
        """What this client publishes."""
        return keys.Member(keys.public(self.sealing), keys.public(self.masking), self.secret("nonce", 16))

    def logged(self, **changes: Any) -> dict[str, Any]:
        """The client's log with these changes of the attempt."""
        runs = {**self.log.get("runs", {}), self.attempt.run: {**self.entry, **changes}}
        return {**self.log, "runs": runs}

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Deletes the secrets of the attempt if the client takes no further part in it."""
        try:
            yield
        except BaseException:
            self.client.secrets.forget(keys.of_run(self.attempt.run))
            raise


def _announced(payload: Payload, client: Client) -> tuple[keys.Attempt, Payload, Mapping[str, Any] | None]:
    """The attempt of this ask, the log, and what it has of the run. Deletes secrets that are not used any more."""
    client.secrets.forget("secagg/", unused=_HOUR)
    attempt, log = keys.Attempt.of(payload[ATTEMPT]["attempt"]), payload["log"]
    return attempt, log, log.get("runs", {}).get(attempt.run)


def _check_sites(what: str, clients: Collection[ClientId], client: Client) -> None:
    """Raises `SecureSumRefused` for clients of a site that this one does not know, and for those of too few sites."""
    identity = client.secrets.identity
    if identity.owners is None:
        return
    if unknown := [each for each in clients if each not in identity.owners]:
        raise keys.SecureSumRefused(f"clients of no approved site are among the {what}: {unknown}")
    if (sites := len({identity.owners[each] for each in clients})) < identity.min_cohort:
        raise keys.SecureSumRefused(
            f"the {what} are of {sites} sites, fewer than min_cohort = {identity.min_cohort}"
        )


def _check_shares(attempt: keys.Attempt, needed: int, client: Client) -> None:
    """Raises `SecureSumRefused` if the clients of another site alone are too many of those that may help the server.

    Each honest client signs one list of survivors, and k helpers sign any number of lists. Two lists with t signatures
    each need 2 (t - k) of the n - k honest clients, so there are none if k < 2t - n (ePrint 2017/281, section 4.1).
    With two lists, each honest client's seed and masking key open, and so its update. A site of one client passes in
    any case: `SecAgg.notes` say how many may help.
    """
    owners = client.secrets.identity.owners
    if owners is None:
        return
    n, others = len(attempt.cohort), Counter(owners[each] for each in attempt.cohort)
    most = max((clients for site, clients in others.items() if site != owners[client.id]), default=0)
    if most > max(1, keys.helpers(n, needed)):
        raise keys.SecureSumRefused(
            f"another site has {most} of the {n} clients of the cohort, and from 2 x {needed} - {n} on they can open "
            "the update of one client with the server"
        )


def step_after(payload: Payload, client: Client, *after: str) -> AttemptStep:
    """The attempt of this ask. Raises `SecureSumRefused` unless the last step that was answered is one of `after`."""
    attempt, log, entry = _announced(payload, client)
    if entry is None or keys.Attempt.of(entry["attempt"]) != attempt or entry["step"] not in after:
        last = "nothing" if entry is None else f"'{entry['step']}' of round {entry['attempt']['round']}"
        raise keys.SecureSumRefused(
            f"attempt {attempt.number} at round {attempt.round} goes on after '{after[0]}', and the client answered "
            f"{last} before"
        )
    return AttemptStep(log, entry, attempt, client)


@dataclass(frozen=True)
class RoundKeys:
    """Publishes the keys of an attempt.

    A later attempt deletes the secrets of the one before. Raises `SecureSumRefused` for a round whose sum the client
    has helped to open, for an earlier one, for an attempt that is not later than the last, for peers that the client
    does not know, of too few sites, or too many of them of one, and, outside a simulation, for a model that was in an
    opened sum before. A simulation says so in `seen` instead.
    """

    terms: keys.Terms

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends `keys` [80], the `signature` of them, and `seen`."""
        attempt, log, last = _announced(payload, client)
        if last is not None:
            before = keys.Attempt.of(last["attempt"])
            done = before.round + (last["step"] == _UNMASKED)
            if attempt.round < done or (attempt.round, attempt.number) <= (before.round, before.number):
                raise keys.SecureSumRefused(
                    f"attempt {attempt.number} at round {attempt.round} comes after attempt {before.number} at round "
                    f"{before.round} ('{last['step']}')"
                )
        if client.id not in attempt.cohort:
            raise keys.SecureSumRefused("the cohort leaves out the client")
        _check_sites("clients of the cohort", attempt.cohort, client)
        _check_shares(attempt, self.terms.needed(len(attempt.cohort)), client)
        seen = _seen(attempt, log, client)
        client.secrets.forget(keys.of_run(attempt.run))
        step = AttemptStep(log, {"attempt": attempt.payload, "step": KEYED}, attempt, client)
        member = step.member()
        signature = client.secrets.identity.sign(signed(attempt, client.id, member))
        sent = {"keys": as_tensor(bytes(member)), "signature": as_tensor(signature), "seen": int(seen)}
        return Outcome({**sent, "log": step.logged()})


def _seen(attempt: keys.Attempt, log: Payload, client: Client) -> bool:
    """Whether the model was in an opened sum. Raises `SecureSumRefused` if it was, unless this is a simulation."""
    seen = attempt.model in log.get("models", ())
    if seen and client.secrets.simulation is None:
        raise keys.SecureSumRefused(
            "the client has been in an opened sum of updates of the same model: the difference of two such sums may be "
            "the update of one client"
        )
    return seen


def signed(attempt: keys.Attempt, client: ClientId, member: keys.Member) -> bytes:
    """What a client signs: its keys, for this attempt."""
    return attempt.hash + keys.digest([client, bytes(member)])


@dataclass(frozen=True)
class SendShares:
    """Seals shares of the client's secrets for each member of the round.

    Raises `SecureSumRefused` if the keys that come back leave out the client, or change its own, if two are equal, if
    one is a point of small order, if a signature is wrong, and if the members are too few or not of the cohort.
    """

    terms: keys.Terms

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends `sealed` [102 x its neighbours], and the `commitment` [32] to the seed of the client's own mask."""
        step = step_after(payload, client, KEYED)
        with step.ending():
            return self._shared(payload[ATTEMPT], step)

    def _shared(self, asked: Payload, step: AttemptStep) -> Outcome:
        transcript = shown_transcript(asked, step, self.terms)
        return Outcome(
            {**self._sent(step, transcript), "log": step.logged(step=_SHARES, **transcript.payload)}
        )

    def _sent(self, step: AttemptStep, transcript: keys.Transcript) -> Payload:
        """The sealed shares, and what the server is told of the secrets."""
        own = step.client.id
        points, shares = [transcript.points[client] for client in transcript.near[own]], list[list[int]]()
        for purpose in ("masking", "seed"):
            random = step.secret(f"shares of {purpose}", shamir.randomness(transcript.shares))
            more = shamir.coefficients(random)
            shares.append(shamir.split(int.from_bytes(step.secret(purpose)), more, points))
        texts = (
            b"".join(each.to_bytes(shamir.SHARE_BYTES) for each in pair) for pair in zip(*shares, strict=True)
        )
        return {
            "sealed": sealed(step, transcript, texts),
            "commitment": as_tensor(transcript.commitment(own, step.secret("seed"))),
        }


def shown_transcript(asked: Payload, step: AttemptStep, terms: keys.Terms) -> keys.Transcript:
    """The keys of all members that the server shows. Raises `SecureSumRefused` for those that `SendShares` refuses."""
    transcript, own = keys.Transcript.of(terms, asked), step.client.id
    members = transcript.members
    if members.get(own) != step.member():
        raise keys.SecureSumRefused(
            "the keys that came back are not those that the client sent, or it has restarted since"
        )
    for (client, member), signature in zip(members.items(), asked["signatures"], strict=True):
        if not step.client.secrets.identity.verify(client, signed(step.attempt, client, member), signature):
            raise keys.SecureSumRefused(f"the signature of client {client} is wrong")
    return transcript


def sealed(
    step: AttemptStep, transcript: keys.Transcript, texts: Iterable[bytes], nonces: str = "gcm"
) -> Tensor:
    """Texts for the members that a client sends some to, each sealed with the places that it is meant for.

    Args:
        nonces: the purpose of the secret that gives the nonces; each is used once in an attempt.
    """
    own, each = step.client.id, keys.pieces(step.secret(nonces, 12 * len(transcript.members)), 12)
    found = bytearray()
    for client, text in zip(transcript.near[own], texts, strict=True):
        point = transcript.points[client]
        text = _PLACES.pack(transcript.points[own], point) + text
        found += transcript.seal(step.sealing, own, client, each[point - 1], text)
    return torch.frombuffer(found, dtype=torch.uint8)


@dataclass(frozen=True)
class MaskedTrain:
    """Trains, and sends the words of the reply under the client's masks.

    y_u = q_u + PRG(b_u) + sum over later v PRG(s_uv) - sum over earlier v PRG(s_uv), over the senders of shares, modulo
    2^32 or 2^64 (ePrint 2017/281, section 4). Raises `SecureSumRefused` if the model, or anything else that it would
    train with, is not what the attempt announced, if a sealed text is forged, and if the senders are too few.
    """

    after: ClassVar[str] = _SHARES
    train: EncodedTrain
    terms: keys.Terms

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends `vector`, the masked words."""
        step = self._begun(payload, client, self._digests(payload))
        rng = Rng.of_operation(int(rng.key[0]), *_plain(step), client.id)
        with step.ending(), random_state_kept(client.device):
            rng.seed_torch(client.device)  # for dropout; the executor has used the number of this ask
            outcome = self.train(payload, client, rng)
        return self._masked(step, outcome)

    def together(self, calls: Sequence[Call]) -> Sequence[Outcome | BaseException]:
        """Trains the clients of a group together; each is masked on its own."""
        assert isinstance(calls, Calls)
        shared, results = self._digests(calls.shared), list[Any]()
        for (payload, client, _), own in zip(calls, calls.payloads, strict=True):
            digests = shared if own.keys() <= set(_OWN_NAMES) else self._digests(payload)
            results.append(_tried(self._begun, payload, client, digests))
        ready = [at for at, step in enumerate(results) if isinstance(step, AttemptStep)]
        asked = calls.only(ready, [_plain(results[at]) for at in ready])
        for at, outcome in zip(ready, self.train.together(asked) if ready else (), strict=True):
            results[at] = _tried(self._masked, results[at], outcome)
        return results

    def obstacle(self) -> Obstacle | None:
        """Why clients cannot train together; None if they can."""
        return self.train.obstacle()

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        """The approximate bytes of each client in a group."""
        return self.train.footprint(device, largest, data)

    def _digests(self, payload: Payload) -> tuple[bytes, bytes]:
        return digests({name: value for name, value in payload.items() if name not in _OWN_NAMES})

    def _begun(self, payload: Payload, client: Client, found: tuple[bytes, bytes]) -> AttemptStep:
        step = step_after(payload, client, self.after)
        with step.ending():
            if found != (step.attempt.model, step.attempt.shared):
                raise keys.SecureSumRefused(
                    "the model, or what comes with it, is not what the round announced"
                )
            return self._prepared(payload, step)

    def _prepared(self, payload: Payload, step: AttemptStep) -> AttemptStep:
        """The attempt, with what the log gets of the senders, and the masks."""
        senders, sealed = list(payload[ATTEMPT]["clients"]), as_bytes(payload[OWN])
        transcript = keys.Transcript.of(self.terms, step.entry)
        keys.subset("senders of shares", senders, step.entry["members"], transcript.needed)
        if step.client.id not in senders:
            raise keys.SecureSumRefused("the senders of shares leave out the client")
        _check_sites("senders of shares", senders, step.client)
        begun = replace(step, entry={**step.entry, "senders": senders, "sealed": sealed})
        _opened(begun, transcript)
        return replace(begun, masks=self._masks(begun, transcript))

    def _masks(self, step: AttemptStep, transcript: keys.Transcript) -> Sequence[tuple[bytes, int]]:
        """The keys of the client's masks, with their signs."""
        own, senders = step.client.id, step.entry["senders"]
        others = [other for other in transcript.among(own, senders) if other != own]
        common = [transcript.common_mask(step.masking, own, other) for other in others]
        return [(transcript.own_mask(own, step.secret("seed")), 1), *common]

    def _mask(self, words: Words, masks: Sequence[tuple[bytes, int]]) -> None:
        """Adds the masks to the words, in place."""
        add_masks(words, masks)

    def _masked(self, step: AttemptStep, outcome: Outcome | BaseException) -> Outcome:
        with step.ending():
            if isinstance(outcome, BaseException):
                raise outcome
            self._mask(outcome.payload[VECTOR].numpy().view(self.train.layout.unsigned), step.masks)
            return outcome._replace(payload={**outcome.payload, "log": step.logged(step=TRAINED)})


def _tried(work: Callable[..., Any], *given: Any) -> Any:
    """What the call returns, or the exception that it raises."""
    try:
        return work(*given)
    except Exception as error:
        return error


def _plain(step: AttemptStep) -> Id:
    """The request that trains this client where nothing is masked, so that its batches are the same."""
    return Id(step.attempt.round, 0, step.attempt.cohort.index(step.client.id))


def digests(shared: Payload) -> tuple[bytes, bytes]:
    """SHA-256 of the model in the shared payload of a training, and of all of that payload."""
    model = keys.digest(shared["model"])
    return model, keys.digest({**shared, "model": model})


def _opened(step: AttemptStep, transcript: keys.Transcript) -> dict[ClientId, bytes]:
    """The text that each sender has sealed for this client."""
    senders = transcript.among(step.client.id, step.entry["senders"])
    return opened_of(step, transcript, senders, step.entry["sealed"])


def opened_of(
    step: AttemptStep, transcript: keys.Transcript, senders: Sequence[ClientId], received: bytes
) -> dict[ClientId, bytes]:
    """The texts of these senders, all of one size. Raises `SecureSumRefused` if one is forged, or meant for another."""
    own, opened = step.client.id, {}
    if transcript.members[own] != step.member():
        raise keys.SecureSumRefused("the client has no secrets of this attempt any more, as after a restart")
    for client, each in zip(senders, keys.pieces(received, len(received) // len(senders)), strict=True):
        plain = transcript.open(step.sealing, client, own, each)
        if _PLACES.unpack_from(plain) != (transcript.points[client], transcript.points[own]):
            raise keys.SecureSumRefused(f"what client {client} sealed is meant for another client")
        opened[client] = plain[_PLACES.size :]
    return opened


def survivors_shown(
    payload: Payload, step: AttemptStep, terms: keys.Terms
) -> tuple[list[ClientId], keys.Transcript]:
    """The list of survivors in an ask. Raises `SecureSumRefused` for one that this client does not open."""
    survivors, transcript = list(payload[ATTEMPT]["clients"]), keys.Transcript.of(terms, step.entry)
    keys.subset("survivors", survivors, step.entry["senders"], transcript.needed)
    if step.client.id not in survivors:
        raise keys.SecureSumRefused("the survivors leave out the client")
    _check_sites("survivors", survivors, step.client)
    return survivors, transcript


def signed_list(transcript: keys.Transcript, survivors: Sequence[ClientId]) -> bytes:
    """What a client signs of a list of survivors, in this attempt and with these members."""
    return transcript.hash + keys.digest(["survivors", *survivors])


@dataclass(frozen=True)
class Agree:
    """Signs the list of survivors that the client is shown, the *ConsistencyCheck* of figure 4.

    A client signs one list for an attempt; the same ask again is answered from the log. Raises `SecureSumRefused` for
    another list, and if the survivors leave out the client, are too few, or were not asked for the masked words.
    """

    terms: keys.Terms

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends the `signature` of the list."""
        step = step_after(payload, client, TRAINED, _AGREED, _UNMASKED)
        if (before := step.entry.get("survivors")) is not None:
            if before != payload[ATTEMPT]["clients"]:
                raise keys.SecureSumRefused(
                    f"the server shows a second list of survivors of attempt {step.attempt.number} at round "
                    f"{step.attempt.round}"
                )
            return Outcome({"signature": as_tensor(step.entry["signature"])})
        with step.ending():
            survivors, transcript = survivors_shown(payload, step, self.terms)
        signature = client.secrets.identity.sign(signed_list(transcript, survivors))
        log = step.logged(step=_AGREED, survivors=survivors, signature=signature)
        return Outcome({"signature": as_tensor(signature), "log": log})


@dataclass(frozen=True)
class Unmask:
    """Sends one share for each sender: of its seed if it is in the sum, of its masking key if it is not.

    A client answers once for a round; the same ask again is answered from the log. Then it keeps the SHA-256 of the
    model, and its secrets are gone. Raises `SecureSumRefused` if the survivors leave out the client, are too few, or
    were not asked for the masked words, and for the model as `RoundKeys` does. At real sites also if they are not the
    list that the client signed, or if fewer than must last have signed it: then all who open this attempt open one sum.
    """

    terms: keys.Terms

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends `shares` [33 x senders of whom it has some]."""
        survivors = list(payload[ATTEMPT]["clients"])
        asked, log = payload[ATTEMPT]["attempt"], payload["log"]
        entry = log.get("runs", {}).get(asked["run"], {})
        again = "answer" in entry and keys.same(entry["asked"], keys.digest([asked, survivors]))
        if again:
            return Outcome({"shares": as_tensor(entry["answer"])})
        step = step_after(payload, client, _AGREED if self.terms.contract else TRAINED)
        with step.ending():
            _seen(step.attempt, log, client)  # another run may have opened one since *Keys*
            answer = self._shares(payload, step)
        client.secrets.forget(keys.of_run(step.attempt.run))
        done = {"step": _UNMASKED, "asked": keys.digest([asked, survivors]), "answer": answer}
        new = step.logged(**done, keys=b"", sealed=b"")
        new["models"] = [*(m for m in log.get("models", ()) if m != step.attempt.model), step.attempt.model]
        return Outcome({"shares": as_tensor(answer), "log": new})

    def _shares(self, payload: Payload, step: AttemptStep) -> bytes:
        survivors, transcript = survivors_shown(payload, step, self.terms)
        if self.terms.contract:
            self._check_agreed(payload[ATTEMPT], survivors, transcript, step)
        return self._answer(_opened(step, transcript), survivors)

    def _answer(self, opened: Mapping[ClientId, bytes], survivors: Sequence[ClientId]) -> bytes:
        """What the server gets of the texts that the senders have sealed for this client."""
        shares = {client: keys.pieces(text, shamir.SHARE_BYTES) for client, text in opened.items()}
        return b"".join(shares[client][client in survivors] for client in shares)

    def _check_agreed(
        self, asked: Payload, survivors: Sequence[ClientId], transcript: keys.Transcript, step: AttemptStep
    ) -> None:
        """Raises `SecureSumRefused` unless this client, and as many as must last, have signed this very list."""
        if survivors != step.entry["survivors"]:
            raise keys.SecureSumRefused("the survivors are not the list that the client has signed")
        signers = asked["signers"]
        keys.subset("signatures of the list of survivors", signers, survivors, transcript.needed)
        message = signed_list(transcript, survivors)
        for client, signature in zip(signers, asked["signatures"], strict=True):
            if not step.client.secrets.identity.verify(client, message, signature):
                raise keys.SecureSumRefused(f"client {client} has not signed this list of survivors")
