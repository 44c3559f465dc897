"""SecAgg+: a secure sum in which each client shares keys with a few others (Bell et al. 2020, ePrint 2020/704)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from fedlens.aggregate.secure.blind_sum import RANGES, Bits, Ranges
from fedlens.aggregate.secure.keys import Terms, digest
from fedlens.aggregate.secure.quantized import Of, OfTau, Weights
from fedlens.aggregate.secure.secagg import SecAgg, secagg
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo
from fedlens.core.types import ClientId

_FEWEST = 200


@dataclass(frozen=True)
class SparseTerms(Terms):
    """Terms under which each client has `degree` neighbours, of whom `held` together know its secrets.

    The graph is a Harary graph on a circle in which the clients stand in an order drawn from what all of them have
    published, nonces included: the degree / 2 next ones on each side are neighbours. A degree of all other clients
    gives SecAgg.

    >>> near = SparseTerms(0.6, "", "", degree=2, held=2).near(list("abcde"), "abcde", b"drawn")
    >>> near["a"], near["b"]
    (['a', 'b', 'c'], ['a', 'b', 'd'])
    """

    degree: int = 0
    held: int = 0

    def shares(self, cohort: int) -> int:
        """How many shares give a secret."""
        return self.held

    def near(
        self, members: Sequence[ClientId], cohort: Sequence[ClientId], seed: bytes
    ) -> Mapping[ClientId, Sequence[ClientId]]:
        """See `Terms.near`."""
        n, side = len(members), self.degree // 2
        if n <= self.degree + 1:
            return super().near(members, cohort, seed)
        circle = sorted(range(n), key=lambda at: digest([seed, at]))
        return {
            members[at]: [members[one] for one in sorted(circle[(p + d) % n] for d in range(-side, side + 1))]
            for p, at in enumerate(circle)
        }


@dataclass(frozen=True)
class SparseGraph:
    """The degree of the graph of a cohort, and how many shares give a secret."""

    degree: int
    shares: int


def graph_for(clients: int, corrupt: float, dropout: float, sigma: int, eta: int) -> SparseGraph | None:
    """The graph of the smallest degree k for which these bounds hold; None if no k below `clients` is enough.

    Definition 3.1 of ePrint 2020/704 for a Harary graph on a random circle, with exact hypergeometric tails, c corrupt
    clients, d that drop out, and t shares:

        n P[c of a client's neighbours >= t]                    <= 2^-sigma   (nobody's secrets are read)
        n P[the k/2 next clients are corrupt or drop out]       <= 2^-sigma   (the others' masks hang together)
        n P[fewer than t of a client's neighbours last]         <= 2^-eta     (else the round ends without a sum)

    Args:
        clients: n.
        corrupt, dropout: shares of n, rounded up.
        sigma, eta: bits.

    >>> graph_for(1000, corrupt=0.1, dropout=0.1, sigma=40, eta=20)
    SparseGraph(degree=46, shares=26)
    >>> graph_for(20, corrupt=0.1, dropout=0.45, sigma=40, eta=20) is None
    True
    """
    from scipy.stats import hypergeom

    others = clients - 1
    c, d = math.ceil(corrupt * clients), math.ceil(dropout * clients)
    for k in range(2, clients, 2):
        against, lasting = hypergeom(others, c, k), hypergeom(others, others - d, k)
        cut = hypergeom(others, min(others, c + d), k // 2).pmf(k // 2)
        if clients * cut > 2.0**-sigma:
            continue
        t = next(t for t in range(2, k + 2) if clients * against.sf(t - 1) <= 2.0**-sigma)
        if clients * lasting.cdf(t - 1) <= 2.0**-eta:
            return SparseGraph(k, t)
    return None


@dataclass(frozen=True)
class SecAggPlus(SecAgg):
    """SecAgg on a sparse graph: a client shares secrets and masks with its neighbours (Bell et al. 2020).

    The update is that of `Quantized` for the clients that last, to the bit. The bounds hold for a server that follows
    the protocol, with up to `corrupt` of the clients.

    Attributes:
        corrupt: the share of a cohort that may work with the server.
        dropout: the share of it that may drop out; 1 - dropout must last, which is `threshold`.
        sigma: clients' vectors stay hidden but for probability 2^-sigma.
        eta: a round in which no more drop out ends without a sum with probability 2^-eta.
        graph: of a cohort, once `fitted` has computed it.
    """

    not_at_sites: ClassVar[str] = "its bounds hold against a server that follows the protocol"
    corrupt: float = 0.1
    dropout: float = 0.1
    sigma: int = 40
    eta: int = 20
    graph: SparseGraph | None = None

    @property
    def terms(self) -> Terms:
        """What all clients must agree on with the server, and the graph."""
        assert self.graph is not None
        return SparseTerms(**vars(super().terms), degree=self.graph.degree, held=self.graph.shares)

    @property
    def notes(self) -> tuple[str, ...]:
        """How many neighbours a client has, and what that promises."""
        assert self.graph is not None
        n, t = self.vectors.cohort, self.terms.needed(self.vectors.cohort)
        return (
            f"Each of {n} clients has {self.graph.degree} neighbours, of whom {self.graph.shares} must last. {n - t} "
            f"clients may drop out, and {self.corrupt:.0%} may work with a server that follows the protocol: then "
            f"vectors stay hidden, but for a probability of 2^-{self.sigma} a round.",
        )

    def fitted(self, train: Any, cohort: int, federation: FederationInfo) -> Self:
        """See `BlindSum.fitted`. Raises `ConfigError` for cohorts that are too small for a sparse graph."""
        fitted = super().fitted(train, cohort, federation)
        graph = graph_for(cohort, self.corrupt, self.dropout, self.sigma, self.eta)
        if cohort < _FEWEST or graph is None:
            raise ConfigError(
                f"a sparse graph saves little or nothing for {cohort} clients a round: with "
                f"{'all others' if graph is None else f'{graph.degree} of {cohort - 1}'} as neighbours its bounds "
                f"{'do not hold' if graph is None else 'hold'}, and from {_FEWEST} clients on it is of use",
                where="select",
                hint=f"set aggregate.name = 'secagg', or select {_FEWEST} clients or more",
            )
        return replace(fitted, graph=graph)


def secagg_plus(
    *,
    of: Of = "mean",
    weighting: Weights = "examples",
    tau_eff: OfTau = "mean",
    corrupt: Annotated[
        float, Field(ge=0, lt=0.5, description="share of a cohort that may work with the server")
    ] = 0.1,
    dropout: Annotated[float, Field(ge=0, lt=0.5, description="share of a cohort that may drop out")] = 0.1,
    sigma: Annotated[
        int, Field(ge=20, le=80, description="a vector may be read with probability 2^-sigma")
    ] = 40,
    eta: Annotated[
        int, Field(ge=5, le=80, description="a round may end without a sum with probability 2^-eta")
    ] = 20,
    bits: Bits = 16,
    range: Ranges = RANGES,  # type: ignore[assignment]
) -> SecAggPlus:
    """The mean, or FedNova's, of replies that only their sum shows, for 200 clients a round or more."""
    whole = secagg(
        of=of, weighting=weighting, tau_eff=tau_eff, threshold=round(1 - dropout, 9), bits=bits, range=range
    )
    return SecAggPlus(**vars(whole), corrupt=corrupt, dropout=dropout, sigma=sigma, eta=eta)
