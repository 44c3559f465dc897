"""SecAgg: the server learns the sum of a round, who is in it, and who left at which step (ePrint 2017/281)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from fedlens.aggregate.mean import AggregateContext
from fedlens.aggregate.secure.blind_sum import RANGES, Bits, BlindSum, Ranges
from fedlens.aggregate.secure.encoded_train import EncodedTrain
from fedlens.aggregate.secure.keys import SURVIVORS, SecureSumRefused, Terms, digest, helpers
from fedlens.aggregate.secure.quantized import Of, OfTau, Weights, computed
from fedlens.aggregate.secure.secagg_client import Agree, MaskedTrain, RoundKeys, SendShares, Unmask
from fedlens.aggregate.secure.secagg_server import AGREE, KEYS, MASKED, SHARES, UNMASK, Masked, masked_sum
from fedlens.aggregate.secure.secagg_takes import secagg_takes
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Answers, Ask, FederationInfo, Op
from fedlens.core.reduction import How, Refusal, Update
from fedlens.core.schema import Schema

Threshold = Annotated[
    float, Field(gt=0.5, le=1, description="fraction of the asked clients that must last in every step")
]


@dataclass(frozen=True)
class SecAgg(BlindSum):
    """sum_k q_k over the clients that last, opened by their shares (Bonawitz et al. 2017, ePrint 2017/281, figure 4).

    The update is that of `Quantized` for these clients, to the bit. A round has four asks: *Keys*, *Shares*, *Masked*,
    in which clients train, and *Unmask*. Clients of real sites sign their keys (`Secrets.identity`), and before
    *Unmask* they are asked to *Agree*: each signs the list of survivors, and opens it if enough have signed the same.
    In a simulation nothing is signed, so the server must be honest but curious.

    Attributes:
        threshold: the fraction of the asked cohort that must last in every step, above 0.5.
        operation: the local training, as a digest, once `fitted` has made it.
        contract: the digest of the experiment that sites approved, likewise; empty in a simulation.
        not_at_sites: why real sites do not run it, as the end of a sentence; empty where they do.

    >>> from fedlens.aggregate.mean import Mean
    >>> SecAgg(Mean("uniform"), threshold=0.6).threshold
    0.6
    """

    once: ClassVar[bool] = True
    not_at_sites: ClassVar[str] = ""
    sums: ClassVar[type[Masked]] = Masked
    _shares: ClassVar[type[SendShares]] = SendShares
    _masked: ClassVar[type[MaskedTrain]] = MaskedTrain
    _unmask: ClassVar[type[Unmask]] = Unmask
    threshold: float = 0.67
    operation: str = ""
    contract: str = ""

    @property
    def terms(self) -> Terms:
        """What all clients must agree on with the server."""
        layout = self.vectors
        vectors = [dict(layout.ranges), layout.bits, layout.words, layout.modulus_bits, layout.largest]
        return Terms(self.threshold, digest(vectors).hex(), self.operation, self.contract)

    @property
    def ops(self) -> Mapping[str, Callable[[Any], Op]]:
        """The operations of its asks. That of *Masked* takes the place of plain training."""
        terms = self.terms
        return {
            KEYS: lambda train: RoundKeys(terms),
            SHARES: lambda train: self._shares(terms),
            MASKED: lambda train: self._masked(EncodedTrain(train, self.vectors), terms),
            AGREE: lambda train: Agree(terms),
            UNMASK: lambda train: self._unmask(terms),
        }

    def takes(self, op: str, training: Schema, clients: int, rounds: int | None) -> Schema | None:
        """What a client may be asked by each operation; of *Agree* nothing in a simulation."""
        signed = bool(self.contract)
        return secagg_takes(op, training, self.vectors.cohort, clients, rounds, signed)

    @property
    def discloses(self) -> tuple[str, ...]:
        """What the server learns, and what protects nothing."""
        return (
            "The server sees one sum over the clients of a round, who is in it, and who left at which step. Nobody can "
            "see which client sent a wrong but finite update.",
            "Sites sign their keys and the list of who is in a sum, and count the sites that they approved. The server "
            "can still send a model that differs in one bit from one that was summed."
            if self.contract
            else "The secrets of this simulation derive from its seed, so its masks protect nothing.",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many clients may drop out, and how many may work with the server."""
        n = self.vectors.cohort
        t = self.terms.needed(n)
        colluding = min(helpers(n, t), n - 2)  # all others together know the sum without the last
        work = {0: "none of the others works", 1: "at most one of the others works"}
        return (
            f"Secure sums of {n} clients need {t} of them to the end, so {n - t or 'none'} may drop out. At real "
            "sites, an active server cannot tell the update of a client from the sum while "
            f"{work.get(colluding, f'at most {colluding} of the others work')} with it.",
        )

    def fitted(self, train: Any, cohort: int, federation: FederationInfo) -> Self:
        """See `BlindSum.fitted`.

        Raises `ConfigError` for cohorts in which each client would read another's vector, and at real sites if they do
        not run it.
        """
        if federation.contract and self.not_at_sites:
            raise ConfigError(
                f"{type(self).__name__} runs in simulations alone: {self.not_at_sites}",
                where="aggregate.name",
                hint="set aggregate.name = 'secagg'",
            )
        if cohort < SURVIVORS:
            raise ConfigError(
                f"a secure sum needs {SURVIVORS} clients, since each of two reads the other's vector, and a round asks "
                f"{cohort}",
                where="select",
                hint=f"select {SURVIVORS} clients or more",
            )
        model, rule = train.model, train.rule
        kind = [train.settings.model_dump_json(), rule.name, train.weighting, train.normalized]
        operation = digest([*kind, model.name, repr(model.settings)]).hex()
        fitted = super().fitted(train, cohort, federation)
        return replace(fitted, operation=operation, contract=federation.contract)

    def exchange(
        self, ask: Ask, fields: Mapping[str, How], ctx: AggregateContext
    ) -> Generator[Ask, Answers, Update | Refusal | None]:
        """The four asks; a `Refusal` if too few clients last, or if the sum fails a check."""
        try:
            total, survivors = yield from masked_sum(ask, self.terms, self.vectors, ctx, self.sums)
        except SecureSumRefused as error:
            return Refusal(str(error))
        return self.opened(total, [r for r in ask.requests if r.client in survivors], ask, ctx)


def secagg(
    *,
    of: Of = "mean",
    weighting: Weights = "examples",
    tau_eff: OfTau = "mean",
    threshold: Threshold = 0.67,
    bits: Bits = 16,
    range: Ranges = RANGES,  # type: ignore[assignment]
) -> SecAgg:
    """The mean, or FedNova's normalized averaging, of replies that only their sum shows to the server."""
    if find_spec("cryptography") is None:
        raise ConfigError(
            "secure sums need the package cryptography",
            where="aggregate.name",
            hint="run: pip install 'fedlens[secure]'",
        )
    return SecAgg(computed(of, weighting, tau_eff), bits, range, threshold=threshold)
