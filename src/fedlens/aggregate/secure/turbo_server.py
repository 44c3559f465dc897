"""The server's side of Turbo-Aggregate: it hands sealed sums from group to group, and opens the last ones."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from fedlens.aggregate.secure import keys
from fedlens.aggregate.secure.encoding import SumLayout
from fedlens.aggregate.secure.field import Q, add, negative, numbers
from fedlens.aggregate.secure.masks import Words
from fedlens.aggregate.secure.secagg_client import ATTEMPT, OWN, as_tensor
from fedlens.aggregate.secure.secagg_server import MASKED, Masked, bytes_field, support, without_metrics
from fedlens.aggregate.secure.turbo_steps import CircleTerms, half, mean
from fedlens.core.protocol import Answers, Ask, Request, RoundContext
from fedlens.core.schema import Field, Schema
from fedlens.core.types import ClientId

PASS = "pass"  # the operation that a group is asked in its turn


@dataclass(frozen=True)
class CircleMasked(Masked):
    """The sum of the server's masks of those who are in. The first group holds the sum of words that they hide."""

    @property
    def terms(self) -> CircleTerms:
        """Those of the attempt."""
        return cast("CircleTerms", self.transcript.terms)

    @property
    def last(self) -> Sequence[ClientId]:
        """The group that ends the sum."""
        return self.terms.groups(self.transcript.attempt.cohort)[0]

    @classmethod
    def collected(
        cls,
        ask: Ask,
        transcript: keys.Transcript,
        signatures: Sequence[bytes],
        layout: SumLayout,
        ctx: RoundContext,
    ) -> Generator[Ask, Answers, CircleMasked]:
        """The training, and *Pass* for one group after the other.

        Raises `SecureSumRefused` before anything opens if fewer than half of a group last.
        """
        terms, members = cast("CircleTerms", transcript.terms), list(transcript.members)
        groups, secret = terms.groups(transcript.attempt.cohort), ctx.entropy(keys.KEY_BYTES)
        masks = {client: transcript.derive(secret, "mask of the server", client) for client in members}
        size = max(map(len, groups)) * terms.sealed_bytes
        fields: dict[str, Field] = {OWN: bytes_field(-1, most=size)}
        requests = [
            Request(request.client, {**request.payload, OWN: as_tensor(masks[request.client])})
            for request in ask.requests
            if request.client in masks
        ]
        shared = {**ask.shared, ATTEMPT: {**transcript.payload, "signatures": list(signatures)}}
        answers = yield replace(
            ask, op=MASKED, requests=requests, shared=shared, expect=Schema(fields), holds=True, logged=True
        )
        words: dict[ClientId, Mapping[ClientId, torch.Tensor]] = {
            reply.client: rows
            for reply in without_metrics(answers)
            if (rows := _by_receiver(transcript, reply.client, reply.payload[OWN])) is not None
        }
        sums: dict[ClientId, Mapping[ClientId, torch.Tensor]] = {}
        for at in [*range(1, len(groups)), 0]:
            former = [client for client in groups[at - 1] if client in words]
            keys.subset("members of a group", former, groups[at - 1], half(groups[at - 1]))
            before = groups[:at] if at else groups
            clients = [c for c in members if c in words and any(c in group for group in before)]
            passed = [client for client in former if client in sums] if at != 1 % len(groups) else []
            asked = {"attempt": transcript.attempt.payload, "clients": clients, "passed": passed}
            asked_of = [client for client in groups[at] if client in words]
            own = {
                client: {
                    OWN: torch.cat([*(words[c][client] for c in former), *(sums[c][client] for c in passed)])
                }
                for client in asked_of
            }
            replies = yield from support(PASS, asked_of, asked, ask.deadline, fields, own)
            keys.subset("members who have passed a sum on", list(replies), groups[at], half(groups[at]))
            for client in former:  # frees what was handed on
                words[client] = sums[client] = {}
            for client, reply in replies.items():
                if at and (rows := _by_receiver(transcript, client, reply[OWN])) is not None:
                    sums[client] = rows
        survivors = [client for client in members if client in words]
        total = cls.start(layout)
        for client in survivors:
            total += terms.mask(masks[client])
        keys.subset("survivors", survivors, members, transcript.needed)
        return cls(transcript, {}, survivors, total)

    @staticmethod
    def start(layout: SumLayout) -> Words:
        """The sum of no masks. It has 64 bits, and is reduced when the sum is opened."""
        return np.zeros(layout.words, np.uint64)

    def answered(self, client: ClientId) -> int:
        """See `Masked.answered`."""
        return 8 * self.terms.words if client in self.last else 0

    def unmasked(self, answers: Mapping[ClientId, bytes]) -> Words:
        """See `Masked.unmasked`. The mean of the last sums is that of all words and masks."""
        rows = {
            at: self.terms.rows(answers[client])
            for at, client in enumerate(self.last, 1)
            if client in answers
        }
        plain, coded = ({member: row[which] for member, row in rows.items()} for which in (0, 1))
        masks = (self.total % Q).astype(np.uint32)
        return numbers(add(mean(plain, coded, len(self.last)), negative(masks))).view(np.uint32)


def _by_receiver(
    transcript: keys.Transcript, sender: ClientId, sent: torch.Tensor
) -> Mapping[ClientId, torch.Tensor] | None:
    """What a client sealed for each member of the next group; None if it has another size."""
    receivers, each = transcript.near[sender], cast("CircleTerms", transcript.terms).sealed_bytes
    if len(sent) != len(receivers) * each:
        return None
    return dict(zip(receivers, sent.view(len(receivers), each), strict=True))
