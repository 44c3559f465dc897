"""Turbo-Aggregate: a secure sum that passes around a circle of groups (So et al. 2021, arXiv 2002.04156)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from fedlens.aggregate.secure.blind_sum import RANGES, Bits, Ranges
from fedlens.aggregate.secure.encoded_train import EncodedTrain
from fedlens.aggregate.secure.field import check_range
from fedlens.aggregate.secure.quantized import Of, OfTau, Weights
from fedlens.aggregate.secure.secagg import SecAgg, secagg
from fedlens.aggregate.secure.secagg_client import RoundKeys
from fedlens.aggregate.secure.secagg_server import KEYS, MASKED, UNMASK, Masked
from fedlens.aggregate.secure.turbo_server import PASS, CircleMasked
from fedlens.aggregate.secure.turbo_steps import CircleTerms, EndSum, PassSum, SpreadTrain, half
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo, Op

_GROUPS = 3  # of two, the server and all but one survivor of a group would read the last one


@dataclass(frozen=True)
class TurboAggregate(SecAgg):
    """sum_k q_k over the clients that last, modulo 2^31 - 1, which groups pass on in a circle (arXiv 2002.04156).

    The update is that of `Quantized` for these clients, to the bit. Asks are *Keys*, the training, *Pass* for one group
    after the other, and *Unmask*. In the training each client sends its words under a mask of the server and noise that
    cancels over the next group. Half of each group may drop out. The server with ceil(N / 2) of the N members of the
    next group reads the words of a client.

    Attributes:
        group: how many clients a group has at least.
    """

    sums: ClassVar[type[Masked]] = CircleMasked
    not_at_sites: ClassVar[str] = "with a few sites of one group its server reads the update of another"
    threshold: float = 0.5
    group: int = 5

    @property
    def terms(self) -> CircleTerms:
        """What all clients must agree on with the server, and the groups."""
        return CircleTerms(**vars(super().terms), size=self.group, words=self.vectors.words)

    @property
    def ops(self) -> Mapping[str, Callable[[Any], Op]]:
        """The operations of its asks. That of *Masked* takes the place of plain training."""
        terms = self.terms
        return {
            KEYS: lambda train: RoundKeys(terms),
            MASKED: lambda train: SpreadTrain(EncodedTrain(train, self.vectors), terms),
            PASS: lambda train: PassSum(terms),
            UNMASK: lambda train: EndSum(terms),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """How many clients may drop out and collude, and what a client sends."""
        n = self.vectors.cohort
        groups = self.terms.groups(range(n))
        least, most = len(groups[-1]), len(groups[0])
        size = f"{least}" if least == most else f"{least} or {most}"
        return (
            f"Secure sums of {n} clients pass {len(groups)} groups of {size}, and half of each group may drop out. The "
            f"server with {half(groups[-1])} members of a group reads an update, and with one it reads sums over "
            f"groups. Each client sends up to {4 * most} times its update.",
        )

    def fitted(self, train: Any, cohort: int, federation: FederationInfo) -> Self:
        """See `SecAgg.fitted`.

        Raises `ConfigError` for fewer than three groups, for and for sums that pass q / 2.
        """
        if cohort < _GROUPS * self.group:
            raise ConfigError(
                f"Turbo-Aggregate needs {_GROUPS} groups of {self.group} clients, and a round asks {cohort}: with "
                "fewer groups the server needs less than half of one to read an update",
                where="select",
                hint=f"select {_GROUPS * self.group} clients or more, or set aggregate.name = 'secagg'",
            )
        fitted = super().fitted(train, cohort, federation)
        check_range(cohort, self.bits)
        return fitted


def turbo_aggregate(
    *,
    of: Of = "mean",
    weighting: Weights = "examples",
    tau_eff: OfTau = "mean",
    group: Annotated[
        int,
        Field(
            ge=5,
            le=10,
            description="clients of a group, at least. Half of each group may drop out, the server with half of one "
            "reads an update, and a client sends 4 times its update for each member",
        ),
    ] = 5,
    bits: Bits = 16,
    range: Ranges = RANGES,  # type: ignore[assignment]
) -> TurboAggregate:
    """The mean, or FedNova's, of replies whose sum passes from group to group; 15 clients or more, simulation only."""
    whole = secagg(of=of, weighting=weighting, tau_eff=tau_eff, threshold=0.5, bits=bits, range=range)
    return TurboAggregate(**vars(whole), group=group)
