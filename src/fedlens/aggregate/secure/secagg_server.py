"""The server's side of SecAgg (Bonawitz et al. 2017, ePrint 2017/281, figure 4): its asks, and checks of the sum."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fedlens.aggregate.secure import keys, shamir
from fedlens.aggregate.secure.encoding import VECTOR, SumLayout
from fedlens.aggregate.secure.masks import Words, add_masks
from fedlens.aggregate.secure.secagg_client import ATTEMPT, OWN, SEALED_BYTES, as_bytes, digests
from fedlens.core.protocol import Answers, Ask, Reply, Request, RoundContext
from fedlens.core.schema import Field, NumberField, Schema, TensorField
from fedlens.core.states import MASKED_SUM
from fedlens.core.types import ClientId, Payload

# The operations; *Masked* takes the place of plain training, and *Agree* is asked of real sites alone.
KEYS, SHARES, MASKED, AGREE, UNMASK = "keys", "shares", "train", "agree", "unmask"
_ATTEMPT = "attempt"  # a note in the journal
SIGNATURE_BYTES = 512  # at most
_NONE = torch.empty(0, dtype=torch.uint8)


def bytes_field(size: int, most: float = float("inf")) -> TensorField:
    """The field for so many bytes; -1 for any number up to `most`."""
    return TensorField((size,), torch.uint8, most=most)


@dataclass(frozen=True)
class Masked:
    """The masked sum of an attempt, all that is needed to open it, and who must have what.

    Attributes:
        transcript: the attempt and the keys of its members.
        commitments: H(b_u) of each sender of shares.
        survivors: the senders whose masked words are in `total`.
        total: unsigned [words].
    """

    transcript: keys.Transcript
    commitments: Mapping[ClientId, bytes]
    survivors: Sequence[ClientId]
    total: Words

    @property
    def payload(self) -> dict[str, Any]:
        """The same as plain values and tensors, for the journal."""
        return {
            **self.transcript.payload,
            "senders": list(self.commitments),
            "commitments": list(self.commitments.values()),
            "survivors": list(self.survivors),
            "total": torch.from_numpy(self.total.view(f"i{self.total.itemsize}")),
        }

    @classmethod
    def of(cls, terms: keys.Terms, payload: Payload) -> Masked:
        """The masked sum whose `payload` this is."""
        commitments = dict(zip(payload["senders"], payload["commitments"], strict=True))
        total = payload["total"].numpy()
        transcript = keys.Transcript.of(terms, payload)
        return cls(transcript, commitments, payload["survivors"], total.view(f"u{total.itemsize}"))

    def secrets(self, shares: Mapping[ClientId, Sequence[bytes]]) -> dict[ClientId, bytes]:
        """The seed of each survivor and the masking key of each other sender, from t shares each.

        Raises `SecureSumRefused` for a seed that does not have the announced hash, and for a key that does not give its
        client's public key.
        """
        held = {
            helper: dict(zip(self.transcript.among(helper, self.commitments), row, strict=True))
            for helper, row in shares.items()
        }
        weights = lru_cache(lambda *points: shamir.weights(points))
        secrets = {}
        for client in self.commitments:
            helpers = self.transcript.among(client, shares)[: self.transcript.shares]
            keys.subset(
                "shares of a client's secret", helpers, list(self.commitments), self.transcript.shares
            )
            points = [self.transcript.points[helper] for helper in helpers]
            parts = [int.from_bytes(held[helper][client]) for helper in helpers]
            number = sum(w * part for w, part in zip(weights(*points), parts, strict=True)) % shamir.PRIME
            secret = (number % 2 ** (8 * keys.KEY_BYTES)).to_bytes(keys.KEY_BYTES)
            if client in self.survivors:
                right = keys.same(self.transcript.commitment(client, secret), self.commitments[client])
            else:
                right = keys.same(
                    keys.public(keys.private_key(secret)), self.transcript.members[client].masking
                )
            if not right:
                raise keys.SecureSumRefused(
                    f"the shares of a secret of client {client} do not give what it announced"
                )
            secrets[client] = secret
        return secrets

    def opened(self, secrets: Mapping[ClientId, bytes]) -> Words:
        """The sum without its masks: |survivors| and |survivors| x |other senders| passes over the words."""
        total = self.total.copy()
        add_masks(total, self._unmasking(secrets))
        return total

    @classmethod
    def collected(
        cls,
        ask: Ask,
        transcript: keys.Transcript,
        signatures: Sequence[bytes],
        layout: SumLayout,
        ctx: RoundContext,
    ) -> Generator[Ask, Answers, Masked]:
        """The asks *Shares* and *Masked*."""
        members, attempt = transcript.members, transcript.attempt
        asked = {**transcript.payload, "signatures": list(signatures)}
        degree = len(transcript.near[next(iter(members))])
        fields = cls.announced(transcript.terms, degree)
        replies = yield from support(SHARES, list(members), asked, ask.deadline, fields)
        senders = list(replies)
        keys.subset("senders of shares", senders, list(members), transcript.needed)
        commitments = {client: as_bytes(reply.get("commitment", _NONE)) for client, reply in replies.items()}

        own = {request.client: request.payload for request in ask.requests}
        sealed = {sender: reply["sealed"].view(degree, -1) for sender, reply in replies.items()}
        requests = []
        for client in senders:
            rows = [
                sealed[sender][transcript.near[sender].index(client)]
                for sender in transcript.among(client, senders)
            ]
            requests.append(Request(client, {**own[client], OWN: torch.cat(rows)}))
        shared = {**ask.shared, ATTEMPT: {"attempt": attempt.payload, "clients": senders}}
        expect = Schema({VECTOR: TensorField((layout.words,), layout.dtype)})
        answers = yield replace(
            ask, op=MASKED, requests=requests, shared=shared, expect=expect, holds=True, logged=True
        )
        total, survivors = cls.start(layout), []
        for reply in without_metrics(answers):
            total += reply.payload[VECTOR].numpy().view(layout.unsigned)
            survivors.append(reply.client)
            del reply  # frees its words before the next one comes
        keys.subset("survivors", survivors, senders, transcript.needed)
        return cls(transcript, commitments, survivors, total)

    @staticmethod
    def announced(terms: keys.Terms, near: int) -> dict[str, Field]:
        """What a client sends in *Shares* that shares its secrets with so many members, itself included."""
        return {"sealed": bytes_field(near * SEALED_BYTES), "commitment": bytes_field(keys.KEY_BYTES)}

    @staticmethod
    def start(layout: SumLayout) -> Words:
        """The sum of no words, in which others are added."""
        return np.zeros(layout.words, layout.unsigned)

    def answered(self, client: ClientId) -> int:
        """How many bytes a survivor answers to *Unmask*."""
        return len(self.transcript.among(client, self.commitments)) * shamir.SHARE_BYTES

    def unmasked(self, answers: Mapping[ClientId, bytes]) -> Words:
        """The sum without its masks, from the answers to *Unmask*."""
        shares = {client: keys.pieces(text, shamir.SHARE_BYTES) for client, text in answers.items()}
        return self.opened(self.secrets(shares))

    def _unmasking(self, secrets: Mapping[ClientId, bytes]) -> Iterator[tuple[bytes, int]]:
        survivors = set(self.survivors)
        for client, secret in secrets.items():
            if client in survivors:
                yield self.transcript.own_mask(client, secret), -1
                continue
            private = keys.private_key(secret)
            # A survivor added the mask with the other sign than this client, so its own sign removes it.
            for survivor in self.transcript.among(client, survivors):
                yield self.transcript.common_mask(private, client, survivor)


def masked_sum(
    ask: Ask, terms: keys.Terms, layout: SumLayout, ctx: RoundContext, kind: type[Masked] = Masked
) -> Generator[Ask, Answers, tuple[Words, Sequence[ClientId]]]:
    """The sum of the words of a cohort, unsigned [words], and the clients that are in it.

    The journal gets the masked sum and its survivors before the ask that opens it, so that a run that was killed asks
    the same again. Raises `SecureSumRefused` if fewer clients last than must, if their shares are wrong, and if a word
    of the sum is larger than theirs can be.

    Args:
        ask: the training of the cohort.
        kind: of a masked sum.
    """
    journal, round = ctx.journal, ctx.round
    if (kept := journal.noted(round, MASKED_SUM)) is not None:
        masked = kind.of(terms, kept)
        attempt = masked.transcript.attempt
        if (attempt.cohort, attempt.model, attempt.shared) != (_cohort(ask), *digests(ask.shared)):
            raise keys.SecureSumRefused(
                "the round was masked with other settings before, and is not repeated"
            )
    else:
        number = (journal.noted(round, _ATTEMPT) or {"number": 0})["number"] + 1
        journal.note(round, _ATTEMPT, {"number": number})  # each is used once
        transcript, signatures = yield from _announced(ask, terms, ctx, number)
        masked = yield from kind.collected(ask, transcript, signatures, layout, ctx)
        journal.note(round, MASKED_SUM, masked.payload)
    total = masked.unmasked((yield from _answers(masked, ask.deadline)))
    if (fault := layout.fault(total, len(masked.survivors))) is not None:
        raise keys.SecureSumRefused(fault)
    return total, masked.survivors


def _announced(
    ask: Ask, terms: keys.Terms, ctx: RoundContext, number: int
) -> Generator[Ask, Answers, tuple[keys.Transcript, list[bytes]]]:
    """Announces an attempt; gives the keys of its members, and their signatures."""
    cohort = _cohort(ask)
    attempt = keys.Attempt.of({
        "run": ctx.journal.run, "round": ctx.round, "number": number, "nonce": ctx.entropy(16), "cohort": cohort,
        **dict(zip(("model", "shared"), digests(ask.shared), strict=True)),
    })  # fmt: skip
    fields: dict[str, Field] = {
        "keys": bytes_field(keys.Member.BYTES),
        "signature": bytes_field(-1, most=SIGNATURE_BYTES),
        "seen": NumberField(above=-1, most=1),
    }
    replies = yield from support(KEYS, cohort, {"attempt": attempt.payload}, ask.deadline, fields)
    members = {client: keys.Member.of(as_bytes(reply["keys"])) for client, reply in replies.items()}
    transcript = keys.Transcript(terms, attempt, members)
    if seen := sum(reply["seen"] for reply in replies.values()):
        ctx.metrics["models_seen"] = seen
    return transcript, [as_bytes(reply["signature"]) for reply in replies.values()]


def _cohort(ask: Ask) -> tuple[ClientId, ...]:
    return tuple(request.client for request in ask.requests)


def _answers(masked: Masked, deadline: float | None) -> Generator[Ask, Answers, dict[ClientId, bytes]]:
    """Asks for what opens the sum. Real sites sign the list of survivors before."""
    survivors, transcript = list(masked.survivors), masked.transcript
    asked: dict[str, Any] = {"attempt": transcript.attempt.payload, "clients": survivors}
    openers = survivors
    fields: dict[str, Field] = {"signature": bytes_field(-1, most=SIGNATURE_BYTES)}
    if transcript.terms.contract:
        replies = yield from support(AGREE, survivors, asked, deadline, fields)
        openers = list(replies)
        keys.subset("signatures of the list of survivors", openers, survivors, transcript.needed)
        signatures = [as_bytes(reply["signature"]) for reply in replies.values()]
        asked = {**asked, "signers": openers, "signatures": signatures}
    sizes = {client: masked.answered(client) for client in openers}
    one, most = len(set(sizes.values())) == 1, max(sizes.values())
    fields = {"shares": bytes_field(most if one else -1, most=most)}
    replies = yield from support(UNMASK, openers, asked, deadline, fields)
    answers = {client: as_bytes(reply["shares"]) for client, reply in replies.items()}
    answers = {client: text for client, text in answers.items() if len(text) == sizes[client]}
    keys.subset("senders of shares that open the sum", list(answers), survivors, transcript.needed)
    return answers


def support(
    op: str,
    clients: Sequence[ClientId],
    asked: Payload,
    deadline: float | None,
    fields: Mapping[str, Field],
    own: Mapping[ClientId, Payload] = MappingProxyType({}),
) -> Generator[Ask, Answers, dict[ClientId, Payload]]:
    """The replies to an ask that supports the training, by client. Refuses keys that are points of small order.

    Args:
        own: what single clients are sent besides.
    """
    requests, shared = [Request(client, own.get(client, {})) for client in clients], {ATTEMPT: asked}
    answers = yield Ask(op, requests, shared, Schema(fields), deadline=deadline, counts=False, logged=True)
    replies: dict[ClientId, Payload] = {}
    for reply in without_metrics(answers):
        try:
            if op == KEYS:
                member = keys.Member.of(as_bytes(reply.payload["keys"]))
                for key in (member.sealing, member.masking):
                    keys.agreed(
                        keys.private_key(bytes(keys.KEY_BYTES)), key
                    )  # with any private key, it would give zeros
            replies[reply.client] = reply.payload
        except keys.SecureSumRefused as error:
            reply.refuse(str(error))
    return replies


def without_metrics(answers: Answers) -> Iterator[Reply]:
    """The replies; refuses those with metrics, which a client could choose the best round by."""
    for answer in answers:
        if isinstance(answer, Reply) and answer.metrics:
            answer.refuse("it has metrics, and a secure sum has none")
        elif isinstance(answer, Reply):
            yield answer
        del answer
