"""LightSecAgg: a secure sum whose masks survivors remove at once, whoever left (So et al. 2022, arXiv 2109.14236)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from fedlens.aggregate.secure.blind_sum import RANGES, Bits, Ranges
from fedlens.aggregate.secure.field import check_range
from fedlens.aggregate.secure.keys import helpers
from fedlens.aggregate.secure.lightsecagg_steps import (
    CodedMasked,
    CodedMaskTrain,
    CodedTerms,
    SendParts,
    SumParts,
)
from fedlens.aggregate.secure.quantized import Of, OfTau, Weights
from fedlens.aggregate.secure.secagg import SecAgg, Threshold, secagg
from fedlens.aggregate.secure.secagg_client import MaskedTrain, SendShares, Unmask
from fedlens.aggregate.secure.secagg_server import Masked
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo


@dataclass(frozen=True)
class LightSecAgg(SecAgg):
    """sum_k q_k over the clients that last, modulo 2^31 - 1, under masks that are coded for all (arXiv 2109.14236).

    The update is that of `Quantized` for these clients, to the bit. The asks are those of `SecAgg`: in *Shares* each
    client sends a coded part of its mask z_u to each member, in *Masked* q_u + z_u, and in *Unmask* the sum of the
    coded parts of those who are in. Any U = ceil(threshold x cohort) of these sums give the sum of the masks, and T
    clients with the server learn nothing else: U > T, and 2U > N + T, so that no two lists of survivors are opened.

    Attributes:
        colluding: T; None for the most that the threshold allows, 2U - N - 1.
    """

    sums: ClassVar[type[Masked]] = CodedMasked
    _shares: ClassVar[type[SendShares]] = SendParts
    _masked: ClassVar[type[MaskedTrain]] = CodedMaskTrain
    _unmask: ClassVar[type[Unmask]] = SumParts
    not_at_sites: ClassVar[str] = "sites have no rule for its coded parts, which are as large as models"
    colluding: int | None = None

    @property
    def terms(self) -> CodedTerms:
        """What all clients must agree on with the server, and how masks are coded."""
        n, terms = self.vectors.cohort, super().terms
        most = helpers(n, terms.needed(n))
        colluding = most if self.colluding is None else self.colluding
        return CodedTerms(**vars(terms), cohort=n, colluding=colluding, words=self.vectors.words)

    @property
    def notes(self) -> tuple[str, ...]:
        """How many clients may drop out and collude, and what a client sends."""
        terms, n = self.terms, self.vectors.cohort
        u, t = terms.needed(n), terms.colluding
        return (
            f"Secure sums of {n} clients need U = {u} of them to the end, so {n - u or 'none'} may drop out, and the "
            f"server with up to T = {t} of them reads no update of another. Each client sends {n} coded parts, "
            f"{n / (u - t):.1f} times its update: N / (U - T) = {n} / {u - t}.",
        )

    def fitted(self, train: Any, cohort: int, federation: FederationInfo) -> Self:
        """See `SecAgg.fitted`.

        Raises `ConfigError` for a T that the threshold does not allow, and for sums that pass q / 2.
        """
        fitted = super().fitted(train, cohort, federation)
        u, t = fitted.terms.needed(cohort), fitted.terms.colluding
        if not 1 <= t <= helpers(cohort, u):
            raise ConfigError(
                f"with U = {u} of N = {cohort} clients that must last, T = {t} cannot collude: T >= 1 and 2U > N + T, "
                f"{2 * u} > {cohort + max(t, 1)}",
                where="aggregate.colluding",
                hint="set a smaller aggregate.colluding" if t > 1 else "set a larger aggregate.threshold",
            )
        check_range(cohort, self.bits)
        return fitted


def lightsecagg(
    *,
    of: Of = "mean",
    weighting: Weights = "examples",
    tau_eff: OfTau = "mean",
    threshold: Threshold = 0.67,
    colluding: Annotated[
        int | None,
        Field(
            ge=1,
            description="T, the clients that with the server learn no update of another. None: the most that the "
            "threshold allows, 2U - N - 1 for U = ceil(threshold x N) of N clients. Each client sends about "
            "N / (U - T) models more",
        ),
    ] = None,
    bits: Bits = 16,
    range: Ranges = RANGES,  # type: ignore[assignment]
) -> LightSecAgg:
    """The mean, or FedNova's, of replies that only their sum shows; simulation only."""
    whole = secagg(of=of, weighting=weighting, tau_eff=tau_eff, threshold=threshold, bits=bits, range=range)
    return LightSecAgg(**vars(whole), colluding=colluding)
