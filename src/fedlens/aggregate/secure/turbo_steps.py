"""The steps of Turbo-Aggregate at clients: coded copies of masked words, and sums that groups pass on (2002.04156)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, cast

import numpy as np

from fedlens.aggregate.secure import keys
from fedlens.aggregate.secure.encoding import VECTOR
from fedlens.aggregate.secure.field import Q, Residues, add, lagrange, negative, product, residues, uniform
from fedlens.aggregate.secure.secagg_client import (
    ATTEMPT,
    KEYED,
    OWN,
    SEALING_BYTES,
    TRAINED,
    AttemptStep,
    MaskedTrain,
    Unmask,
    as_bytes,
    as_tensor,
    opened_of,
    sealed,
    shown_transcript,
    step_after,
    survivors_shown,
)
from fedlens.core.protocol import Client, Outcome
from fedlens.core.random import Rng
from fedlens.core.types import ClientId, Payload

LABEL_BYTES = 32  # before the words of a sealed text: SHA-256 of the clients whose words they sum
_WORD = np.dtype("<u4")  # as it is sent


def spread(words: Residues, noise: Residues, q: int = Q) -> tuple[Residues, Residues]:
    """x + u + r_j for each member j of the next group, with sum_j r_j = 0, and their coded copies: [N, n] each.

    With f(j) = x + u + r_j the coded copy of member j is f(N + j), for the polynomial f of N terms (arXiv 2002.04156,
    equations 9 and 10). Any N of these 2N values give f, and so x + u, their mean. Fewer than ceil(N / 2) members have
    values that are uniform, whatever x is.

    Args:
        words: x + u, [n].
        noise: all r_j but the last, [N - 1, n].
    """
    last = negative(product([[1] * len(noise)], noise, q), q)
    plain = add(np.concatenate([noise, last]), words, q)
    n = len(plain)
    return plain, product(lagrange(_points(n, coded=True), _points(n), q), plain, q)


def mean(plain: Mapping[int, Residues], coded: Mapping[int, Residues], size: int, q: int = Q) -> Residues:
    """The mean over a group of the sums that its members hold, from those who last and their coded copies.

    The sums of the others are those of the polynomial through N of the values. Raises `SecureSumRefused` if more than
    half of the group are missing.

    Args:
        plain, coded: by the number of the member, from 1.
        size: N, the members of the group.
    """
    values = {**plain, **{size + member: row for member, row in coded.items()}}
    if len(values) < size:
        raise keys.SecureSumRefused(
            f"{len(plain)} of the {size} members of a group have passed a sum on, and half of them must last"
        )
    chosen = dict(islice(values.items(), size))
    missing = tuple(point for point in _points(size) if point not in plain)
    rows = [[int(point in plain) for point in chosen], *lagrange(missing, tuple(chosen), q)]
    inverse = pow(size, -1, q)
    factors = [sum(column) * inverse % q for column in zip(*rows, strict=True)]
    return product([factors], chosen.values(), q).reshape(-1)


def _points(size: int, coded: bool = False) -> tuple[int, ...]:
    """Where the values for the members of a group are taken, and, with `coded`, their copies."""
    return tuple(range(1 + size * coded, 1 + size + size * coded))


@dataclass(frozen=True)
class CircleTerms(keys.Terms):
    """Terms under which sums go around a circle of groups.

    Attributes:
        size: how many clients a group has at least.
        words: of a vector.

    >>> CircleTerms(0.5, "", "", size=2).groups(list("abcde"))
    (['a', 'c', 'e'], ['b', 'd'])
    """

    size: int = 0
    words: int = 0

    def groups(self, cohort: Sequence[ClientId]) -> tuple[Sequence[ClientId], ...]:
        """The groups in the order in which sums pass. The first group receives from the last one, and ends the sum."""
        count = len(cohort) // self.size
        return tuple(cohort[at::count] for at in range(count))

    def near(
        self, members: Sequence[ClientId], cohort: Sequence[ClientId], seed: bytes
    ) -> Mapping[ClientId, Sequence[ClientId]]:
        """The members of the next group, to whom each member sends."""
        groups = self.groups(cohort)
        receiving = [[client for client in group if client in members] for group in (*groups[1:], groups[0])]
        return {client: to for group, to in zip(groups, receiving, strict=True) for client in group}

    @property
    def sealed_bytes(self) -> int:
        """The bytes of a sealed text: words, and their coded copies."""
        return SEALING_BYTES + LABEL_BYTES + 2 * self.words * _WORD.itemsize

    def rows(self, data: bytes) -> tuple[Residues, Residues]:
        """The words in the text of one client, and their coded copies."""
        both: Residues = np.frombuffer(data, _WORD).reshape(2, self.words) % np.uint32(Q)
        return both[0], both[1]

    def mask(self, key: bytes) -> Residues:
        """u: what the server hides the words of a client with from the other clients."""
        return uniform(key, self.words)


def half(group: Sequence[ClientId]) -> int:
    """How many members of a group must last.

    >>> half(range(5)), half(range(6))
    (3, 3)
    """
    return -(-len(group) // 2)


def _text(label: bytes, *words: Residues) -> bytes:
    return label + b"".join(row.astype(_WORD, copy=False).tobytes() for row in words)


@dataclass(frozen=True)
class SpreadTrain(MaskedTrain):
    """Trains, and sends x + u + r_j to each member j of the next group, with coded copies, sealed.

    Raises as `MaskedTrain` and `SendShares` do.
    """

    after: ClassVar[str] = KEYED

    def _prepared(self, payload: Payload, step: AttemptStep) -> AttemptStep:
        transcript = shown_transcript(payload[ATTEMPT], step, self.terms)
        noise = transcript.derive(step.secret("seed"), "noise of a group", step.client.id)
        entry = {**step.entry, **transcript.payload, "senders": list(transcript.members)}
        return replace(step, entry=entry, masks=[(as_bytes(payload[OWN]), 1), (noise, 1)])

    def _masked(self, step: AttemptStep, outcome: Outcome | BaseException) -> Outcome:
        with step.ending():
            if isinstance(outcome, BaseException):
                raise outcome
            terms, own = cast("CircleTerms", self.terms), step.client.id
            transcript = keys.Transcript.of(terms, step.entry)
            groups = terms.groups(transcript.attempt.cohort)
            at = next(at for at, group in enumerate(groups) if own in group)
            to = groups[(at + 1) % len(groups)]
            layout = self.train.layout
            words = residues(layout.signed(outcome.payload[VECTOR].numpy().view(layout.unsigned)))
            (mask, _), (key, _) = step.masks
            noise = uniform(key, (len(to) - 1) * terms.words).reshape(-1, terms.words)
            rows = zip(*spread(add(words, terms.mask(mask)), noise), strict=True)
            label = keys.digest(own)
            texts = (
                _text(label, *row)
                for client, row in zip(to, rows, strict=True)
                if client in transcript.members
            )
            sent = {OWN: sealed(step, transcript, texts), "log": step.logged(step=TRAINED)}
            return Outcome(sent, outcome.state)


@dataclass(frozen=True)
class PassSum:
    """Adds the words of the former group to the mean of its sums, and sends the result to the next group, sealed.

    s_j <- mean over the former group of s + sum_i (x_i + u_i + r_ij), and likewise for the coded copies (arXiv
    2002.04156, equations 11 to 14). The first group, which ends the circle, keeps it for `EndSum`. Each sum names the
    clients in it, so that all members of a group add one set. A client does this once in an attempt. Raises
    `SecureSumRefused` if fewer than half of the former group are in, or have passed a sum on.
    """

    terms: CircleTerms

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        """Sends `sealed`, which is empty for the first group."""
        step = step_after(payload, client, TRAINED)
        with step.ending():
            if "passed" in step.entry:
                raise keys.SecureSumRefused("the client has passed a sum on in this attempt before")
            return self._passed(payload, step, keys.Transcript.of(self.terms, step.entry))

    def _passed(self, payload: Payload, step: AttemptStep, transcript: keys.Transcript) -> Outcome:
        asked, groups = payload[ATTEMPT], self.terms.groups(transcript.attempt.cohort)
        at = next(at for at, group in enumerate(groups) if step.client.id in group)
        former, first = groups[at - 1], at == 1 % len(groups)
        clients, passed = list(asked["clients"]), list(asked["passed"])
        keys.subset("clients in a sum", clients, step.entry["senders"], 1)
        new = [client for client in former if client in clients]
        keys.subset("members of a group in a sum", new, former, half(former))
        keys.subset("members who have passed a sum on", passed, new, 0 if first else half(former))
        received, size = as_bytes(payload[OWN]), len(new) * self.terms.sealed_bytes
        words = {
            sender: self._read(text, keys.digest(sender))
            for sender, text in opened_of(step, transcript, new, received[:size]).items()
        }
        sums = [np.zeros(self.terms.words, np.uint32)] * 2
        if not first:
            label = keys.digest([client for client in clients if client not in new])
            texts = opened_of(step, transcript, passed, received[size:])
            rows = {former.index(sender) + 1: self._read(text, label) for sender, text in texts.items()}
            plain, coded = ({member: row[which] for member, row in rows.items()} for which in (0, 1))
            sums = [mean(plain, coded, len(former))] * 2
        for row in words.values():
            sums = [add(total, part) for total, part in zip(sums, row, strict=True)]
        label, log = keys.digest(clients), {"passed": True}
        if at == 0:  # `Unmask` deletes what is sealed once it has answered
            text = _text(label, *sums)
            return Outcome({OWN: as_tensor(b""), "log": step.logged(**log, sealed=text)})
        copies = [_text(label, *sums)] * len(transcript.near[step.client.id])
        return Outcome({OWN: sealed(step, transcript, copies, "gcm of a sum"), "log": step.logged(**log)})

    def _read(self, text: bytes, label: bytes) -> tuple[Residues, Residues]:
        if not keys.same(text[:LABEL_BYTES], label):
            raise keys.SecureSumRefused("a sum that was passed on is of other clients")
        return self.terms.rows(text[LABEL_BYTES:])


@dataclass(frozen=True)
class EndSum(Unmask):
    """Sends what a member of the first group holds; others send nothing. Raises, and answers once, as `Unmask`."""

    def _shares(self, payload: Payload, step: AttemptStep) -> bytes:
        survivors, _ = survivors_shown(payload, step, self.terms)
        kept: bytes = step.entry.get("sealed", b"")
        if kept and not keys.same(kept[:LABEL_BYTES], keys.digest(survivors)):
            raise keys.SecureSumRefused("the survivors are not the clients in the sum")
        return kept[LABEL_BYTES:]
