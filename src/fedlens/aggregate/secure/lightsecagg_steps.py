"""The steps of LightSecAgg in which it differs from SecAgg: masks that are coded for all members (arXiv 2109.14236)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from fedlens.aggregate.secure import keys
from fedlens.aggregate.secure.encoding import SumLayout
from fedlens.aggregate.secure.field import (
    Q,
    Residues,
    add,
    lagrange,
    negative,
    numbers,
    product,
    residues,
    uniform,
)
from fedlens.aggregate.secure.masks import Words
from fedlens.aggregate.secure.secagg_client import (
    SEALING_BYTES,
    AttemptStep,
    MaskedTrain,
    SendShares,
    Unmask,
    sealed,
)
from fedlens.aggregate.secure.secagg_server import Masked, bytes_field
from fedlens.core.schema import Field
from fedlens.core.types import ClientId, Payload

_BYTES = 4  # of a word
_WORD = np.dtype("<u4")  # as it is sent


def coded(parts: Residues, noise: Residues, members: int, q: int = Q) -> Residues:
    """The coded parts of a mask, one for each member: any len(parts) + len(noise) of them give it.

    f(n + k) is part k of the mask and its noise, and f(j) what member j of n gets, for a polynomial f over the field
    (arXiv 2109.14236, equation 5). Any len(noise) members learn nothing of the mask if the noise is uniform, as no
    point of a member is one of a part.

    Args:
        parts: of the mask, [U - T, n].
        noise: [T, n].
        members: how many there are.
    """
    values = [*parts, *noise]
    return product(lagrange(_members(members), _parts(members, len(values)), q), values, q)


def decoded(rows: Mapping[int, Residues], parts: int, members: int, q: int = Q) -> Residues:
    """The first `parts` parts of a mask, or of a sum of masks, from as many coded parts as all have values.

    Args:
        rows: the coded parts, by the number of the member, from 1.
        members: how many there are.
    """
    wanted = _parts(members, len(rows))[:parts]
    return product(lagrange(wanted, tuple(rows), q), rows.values(), q)


def _members(members: int) -> tuple[int, ...]:
    return tuple(range(1, members + 1))


def _parts(members: int, parts: int) -> tuple[int, ...]:
    return tuple(range(members + 1, members + parts + 1))


@dataclass(frozen=True)
class CodedTerms(keys.Terms):
    """Terms under which a mask is coded for all members.

    Attributes:
        cohort: N, the largest.
        colluding: T, how many members learn nothing of the mask of another.
        words: of a vector.
    """

    cohort: int = 0
    colluding: int = 0
    words: int = 0

    def needed(self, cohort: int) -> int:
        """U, how many must last, and how many coded parts give a mask: that of the largest cohort."""
        return super().needed(self.cohort)

    @property
    def parts(self) -> int:
        """U - T, the parts of a mask."""
        return self.needed(self.cohort) - self.colluding

    @property
    def length(self) -> int:
        """The words of a part. The last part has more of them than the vector needs."""
        return -(-self.words // self.parts)

    def mask(self, transcript: keys.Transcript, client: ClientId, seed: bytes) -> Residues:
        """The mask z of a client, in parts: [U - T, length]."""
        words = uniform(transcript.own_mask(client, seed), self.parts * self.length)
        return words.reshape(self.parts, self.length)

    def noise(self, transcript: keys.Transcript, client: ClientId, seed: bytes) -> Residues:
        """What hides the mask from T members: [T, length]."""
        key = transcript.derive(seed, "noise of the coded parts", client)
        return uniform(key, self.colluding * self.length).reshape(self.colluding, self.length)


@dataclass(frozen=True)
class SendParts(SendShares):
    """Seals a coded part of the client's mask for each member. Raises as `SendShares` does."""

    def _sent(self, step: AttemptStep, transcript: keys.Transcript) -> Payload:
        terms, own, seed = cast("CodedTerms", self.terms), step.client.id, step.secret("seed")
        mask, noise = terms.mask(transcript, own, seed), terms.noise(transcript, own, seed)
        parts = coded(mask, noise, len(transcript.members)).astype(_WORD, copy=False)
        return {"sealed": sealed(step, transcript, (part.tobytes() for part in parts))}


@dataclass(frozen=True)
class CodedMaskTrain(MaskedTrain):
    """Trains, and sends q_u + z_u modulo 2^31 - 1. Raises as `MaskedTrain` does."""

    def _masks(self, step: AttemptStep, transcript: keys.Transcript) -> Sequence[tuple[bytes, int]]:
        return [(transcript.own_mask(step.client.id, step.secret("seed")), 1)]

    def _mask(self, words: Words, masks: Sequence[tuple[bytes, int]]) -> None:
        plain = residues(self.train.layout.signed(words))
        terms = cast("CodedTerms", self.terms)
        words[:] = add(plain, uniform(masks[0][0], terms.parts * terms.length)[: len(words)])


@dataclass(frozen=True)
class SumParts(Unmask):
    """Sends the sum of the coded parts of those who are in. Raises, and answers once for a round, as `Unmask` does."""

    def _answer(self, opened: Mapping[ClientId, bytes], survivors: Sequence[ClientId]) -> bytes:
        total = np.zeros(cast("CodedTerms", self.terms).length, np.uint64)
        for client in survivors:
            total += np.frombuffer(opened[client], _WORD)
        return (total % Q).astype(_WORD).tobytes()


@dataclass(frozen=True)
class CodedMasked(Masked):
    """The masked sum of an attempt, which the sums of coded parts of any U survivors open. It has no commitments."""

    @staticmethod
    def announced(terms: keys.Terms, near: int) -> dict[str, Field]:
        """See `Masked.announced`."""
        return {"sealed": bytes_field(near * (SEALING_BYTES + cast("CodedTerms", terms).length * _BYTES))}

    @staticmethod
    def start(layout: SumLayout) -> Words:
        """The sum of no words. It has 64 bits, and is reduced when it is opened."""
        return np.zeros(layout.words, np.uint64)

    def answered(self, client: ClientId) -> int:
        """See `Masked.answered`."""
        return self.terms.length * _BYTES

    @property
    def terms(self) -> CodedTerms:
        """Those of the attempt."""
        return cast("CodedTerms", self.transcript.terms)

    def unmasked(self, answers: Mapping[ClientId, bytes]) -> Words:
        """See `Masked.unmasked`. The sum of the masks is decoded from the first U answers."""
        points = self.transcript.points
        first = list(answers)[: self.transcript.needed]
        rows = {points[client]: np.frombuffer(answers[client], _WORD) % Q for client in first}
        masks = decoded(rows, self.terms.parts, len(points)).reshape(-1)[: self.terms.words]
        return numbers(add((self.total % Q).astype(np.uint32), negative(masks))).view(np.uint32)
