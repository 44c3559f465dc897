"""A federation that computes secure sums without a run: sites with secrets and logs, and a lossy network."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlens.aggregate.secure.encoding import VECTOR, SumLayout
from fedlens.aggregate.secure.keys import SecureSumRefused, Terms
from fedlens.aggregate.secure.lightsecagg_steps import (
    CodedMasked,
    CodedMaskTrain,
    CodedTerms,
    SendParts,
    SumParts,
)
from fedlens.aggregate.secure.secagg_client import Agree, MaskedTrain, RoundKeys, SendShares, Unmask
from fedlens.aggregate.secure.secagg_server import AGREE, KEYS, MASKED, SHARES, UNMASK, Masked, masked_sum
from fedlens.aggregate.secure.turbo_server import PASS, CircleMasked
from fedlens.aggregate.secure.turbo_steps import CircleTerms, EndSum, PassSum, SpreadTrain
from fedlens.core.dataset_info import FederationInfo
from fedlens.core.payload import pack, unpack
from fedlens.core.protocol import Ask, Client, Failure, Id, Outcome, Reply, Request, RoundContext
from fedlens.core.random import Identity, Rng, Secrets
from fedlens.core.schema import NumberField, Schema, TreeField
from fedlens.core.states import Journal

STEPS = (KEYS, SHARES, MASKED, UNMASK)
RNG = Rng.of_operation(0, 1, 0, 0, 0)


def layout_of(size: int = 3, bits: int = 8, cohort: int = 20) -> SumLayout:
    """A vector of `size` + 2 words."""
    fields = {
        "update": TreeField({"w": ((size,), torch.float32)}),
        "buffers": TreeField({}),
        "counters": TreeField({}),
        "weight": NumberField(above=0, most=1.0),
    }
    return SumLayout(Schema(fields), {}, {"update": 1.0, "buffers": 1.0, "loss": 1.0}, bits, cohort)


@dataclass(frozen=True)
class FixedWords:
    """An operation in place of the training: sends the words that the client's data are."""

    layout: SumLayout

    def __call__(self, payload: Mapping[str, Any], client: Client, rng: Rng) -> Outcome:
        return Outcome({VECTOR: torch.from_numpy(client.data.copy())}, {"visits": 1})


@dataclass
class Site:
    """A client with what it keeps."""

    id: int
    words: np.ndarray
    secrets: Secrets = field(default_factory=Secrets)
    log: Mapping[str, Any] = field(default_factory=dict)

    def client(self) -> Client:
        """What an operation gets of it."""
        return Client(self.id, self.words, {}, self.secrets, {}, torch.device("cpu"))


@dataclass
class SumFederation:
    """Sites, the terms of their sums, and the server's journal.

    Attributes:
        wire: whether payloads and logs pass a network's encoding.
        contract: that of real sites, which sign the list of survivors; see `signed_by`.
        kind: of a masked sum.
        view: all that the server got, by operation: its asks and answers.
    """

    n: int = 5
    threshold: float = 0.51
    layout: SumLayout = field(default_factory=layout_of)
    journal: Journal = field(default_factory=lambda: Journal("run"))
    seed: int = 0
    wire: bool = False
    contract: str = ""
    kind: ClassVar[type[Masked]] = Masked
    entropy: Callable[[int], bytes] = os.urandom
    sites: list[Site] = field(default_factory=list)
    view: list[tuple[Ask, list[Any]]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        most = 1 << self.layout.bits
        for k in range(self.n):
            words = draw.integers(-most, most + 1, self.layout.words)
            words[-1] = draw.integers(1, most + 1)  # the weight
            self.sites.append(Site(k, words.astype(np.dtype(f"i{self.layout.modulus_bits // 8}"))))

    def signed_by(self, owners: Mapping[int, str], min_cohort: int = 0) -> Self:
        """The same whose clients sign with keys of their own, and belong to these sites."""
        signers = [Ed25519PrivateKey.generate() for _ in self.sites]
        known = [signer.public_key() for signer in signers]

        def verify(client: Any, message: bytes, signature: bytes) -> bool:
            try:
                known[client].verify(signature, message)
            except InvalidSignature:
                return False
            return True

        for site, signer in zip(self.sites, signers, strict=True):
            site.secrets = Secrets(identity=Identity(signer.sign, verify, owners, min_cohort))
        return self

    @property
    def terms(self) -> Terms:
        """The terms of all."""
        return Terms(self.threshold, repr(self.layout.ranges), "train", self.contract)

    def ops(self, site: Site) -> Mapping[str, Any]:
        """The operations at a site."""
        return {
            KEYS: RoundKeys(self.terms),
            SHARES: SendShares(self.terms),
            MASKED: MaskedTrain(FixedWords(self.layout), self.terms),  # type: ignore[arg-type]
            AGREE: Agree(self.terms),
            UNMASK: Unmask(self.terms),
        }

    def plain(self, clients: Any) -> np.ndarray:
        """The sum of the words of these clients, unsigned."""
        total = np.zeros(self.layout.words, self.layout.unsigned)
        for k in clients:
            total += self.sites[k].words.view(self.layout.unsigned)
        return total

    def asked(
        self, round: int = 1, model: float = 0.0, cohort: Any = None, terms: Terms | None = None
    ) -> Generator[Ask, Any, tuple[Any, Any]]:
        """The asks of a round; `terms` are those of a server that has others than its clients."""
        context = RoundContext(
            round,
            9,
            FederationInfo(np.ones(self.n, int), 2, (1,)),
            RNG,
            metrics=self.sums,
            entropy=self.entropy,
            journal=self.journal,
        )
        requests = [Request(k, {"work": 1}) for k in (range(self.n) if cohort is None else cohort)]
        ask = Ask("train", requests, {"model": {"w": torch.tensor([model])}, "lr": 0.1})
        return masked_sum(ask, terms or self.terms, self.layout, context, self.kind)

    def answer(self, ask: Ask, request: Request, slot: int = 0) -> Any:
        """The answer of a site to one request, over a network, and its new log."""
        site = self.sites[request.client]
        sent = {**ask.shared, **request.payload, "log": site.log}
        sent = unpack(*pack(sent)) if self.wire else sent
        try:
            outcome = self.ops(site)[ask.op](sent, site.client(), RNG)
        except (SecureSumRefused, ValueError) as error:
            return Failure(Id(1, 0, slot), request.client, str(error))
        payload = unpack(*pack(outcome.payload)) if self.wire else dict(outcome.payload)
        site.log = payload.pop("log", site.log)
        fault = ask.expect.fault(payload)
        if fault is not None:
            return Failure(Id(1, 0, slot), request.client, fault)
        return Reply(Id(1, 0, slot), request.client, payload)

    def drive(
        self,
        steps: Generator[Ask, Any, tuple[Any, Any]],
        lost: Callable[[str, int], bool] = lambda op, client: False,
        change: Callable[[Ask, Request], tuple[Ask, Request]] = lambda ask, request: (ask, request),
        kill: tuple[str, str] | None = None,
        replied: Callable[[Ask, Any], Any] = lambda ask, answer: answer,
    ) -> tuple[np.ndarray, int]:
        """Runs a round; returns its sum and the number of clients in it.

        Args:
            lost: whether a client does not get an ask.
            change: what an attacker makes of an ask to one client.
            kill: "before" or "after", and an operation: the server is killed before it asks, or once clients answered.
            replied: what an attacker makes of an answer.

        Raises `Killed`, and what the server raises.
        """
        ask = next(steps)
        while True:
            if kill == ("before", ask.op):
                steps.close()
                raise Killed
            answers: list[Any] = []
            for slot, request in enumerate(ask.requests):
                if lost(ask.op, request.client):
                    answers.append(Failure(Id(1, 0, slot), request.client, "lost"))
                else:
                    answers.append(replied(ask, self.answer(*change(ask, request), slot)))
            self.view.append((ask, answers))
            if kill == ("after", ask.op):
                steps.close()
                raise Killed
            try:
                ask = steps.send(iter(answers))
            except StopIteration as end:
                total, survivors = end.value
                return total, len(survivors)

    def failures(self) -> list[str]:
        """The reasons of all failures so far."""
        return [a.reason for _, answers in self.view for a in answers if isinstance(a, Failure)]


@dataclass
class CodedFederation(SumFederation):
    """The same with LightSecAgg: four of five must last, and two may collude."""

    threshold: float = 0.8
    colluding: int = 2
    kind: ClassVar[type[Masked]] = CodedMasked

    @property
    def terms(self) -> CodedTerms:
        return CodedTerms(
            **vars(super().terms), cohort=self.n, colluding=self.colluding, words=self.layout.words
        )

    def ops(self, site: Site) -> Mapping[str, Any]:
        return {
            KEYS: RoundKeys(self.terms),
            SHARES: SendParts(self.terms),
            MASKED: CodedMaskTrain(FixedWords(self.layout), self.terms),  # type: ignore[arg-type]
            UNMASK: SumParts(self.terms),
        }


@dataclass
class CircleFederation(SumFederation):
    """The same with Turbo-Aggregate, in groups of `size`."""

    threshold: float = 0.5
    size: int = 2
    kind: ClassVar[type[Masked]] = CircleMasked

    @property
    def terms(self) -> CircleTerms:
        return CircleTerms(**vars(super().terms), size=self.size, words=self.layout.words)

    def ops(self, site: Site) -> Mapping[str, Any]:
        return {
            KEYS: RoundKeys(self.terms),
            MASKED: SpreadTrain(FixedWords(self.layout), self.terms),  # type: ignore[arg-type]
            PASS: PassSum(self.terms),
            UNMASK: EndSum(self.terms),
        }


class Killed(Exception):
    """The server was killed."""


def in_hex(value: Any) -> str:
    """All bytes and tensors of bytes in a payload, in hex."""
    if isinstance(value, torch.Tensor):
        return in_hex(value.numpy().tobytes())
    if isinstance(value, bytes):
        return value.hex() + " "
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return "".join(map(in_hex, items))


def altered(ask: Ask, **changes: Any) -> Ask:
    """An ask whose part of the protocol differs."""
    shared = {**ask.shared, "secagg": {**ask.shared["secagg"], **changes}}
    return replace(ask, shared=shared)
