"""Who takes part in a round, and which of them are stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.base.registry import Entry, Registry
from fedlens.core.protocol import FederationInfo, RoundContext
from fedlens.core.random import Rng, SystemRng
from fedlens.local.settings import LocalSettings


class Select(Protocol):
    """Client selection: chooses the cohort of a round. Use `RepeatingSelect` if a client can appear in it twice."""

    def cohort(self, ctx: RoundContext) -> list[int]:
        """The clients of this round, in the order of their slots."""
        ...

    def size(self, federation: FederationInfo) -> int:
        """The size of a cohort, or its expectation. Raises `ConfigError` if the population is too small."""
        ...


@dataclass(frozen=True)
class SecretCohorts:
    """The cohorts of another selection, drawn from the operating system's entropy in place of the seed.

    Who can compute a cohort knows who was not in it, and that clients were drawn at random protects nobody.
    """

    select: Select

    def cohort(self, ctx: RoundContext) -> list[int]:
        """A cohort that no seed repeats; nobody in a round that masked a sum of others before a kill."""
        if ctx.journal.given_up(ctx.round):
            return []
        return self.select.cohort(replace(ctx, rng=SystemRng(ctx.rng.key, ctx.entropy)))

    def size(self, federation: FederationInfo) -> int:
        """That of the selection."""
        return self.select.size(federation)


@runtime_checkable
class RepeatingSelect(Select, Protocol):
    """A selection that may choose a client twice in one round, depending on the federation.

    Used to refuse it beside rules that keep a sum over all clients' states. A selection without `repeats` never
    chooses a client twice.
    """

    def repeats(self, federation: FederationInfo) -> bool:
        """Whether a client may appear twice in a cohort."""
        ...


def refuse_repeats(select: Select, federation: FederationInfo, name: str) -> None:
    """Raises `ConfigError` if the selection may choose a client twice in a round of the algorithm `name`."""
    if repeats(select, federation):
        raise ConfigError(
            f"'{name}' trains a client once a round, but this selection may choose one twice",
            where="select.name",
            hint="set select.name = 'uniform'",
        )


def repeats(select: Select, federation: FederationInfo) -> bool:
    """Whether a client may appear twice in a cohort of this selection.

    >>> import numpy as np
    >>> federation = FederationInfo(np.array([600, 100]), 10, (1, 28, 28))
    >>> repeats(Fixed((0, 0)), federation), repeats(Uniform(2), federation)
    (True, False)
    """
    return isinstance(select, RepeatingSelect) and select.repeats(federation)


@runtime_checkable
class LimitedSelect(Select, Protocol):
    """A selection that can choose some of the clients alone. One without `candidates` can choose any with data."""

    def candidates(self, federation: FederationInfo) -> Sequence[int]:
        """The clients that can appear in a cohort, each once."""
        ...


def candidates(select: Select, federation: FederationInfo) -> Sequence[int]:
    """The clients that can appear in a cohort of this selection, each once.

    >>> federation = FederationInfo(np.array([600, 100, 0]), 10, (1, 28, 28))
    >>> candidates(Fixed((1, 1)), federation), candidates(Uniform(2), federation)
    ([1], [0, 1])
    """
    if isinstance(select, LimitedSelect):
        return select.candidates(federation)
    eligible: list[int] = federation.eligible.tolist()
    return eligible


@dataclass(frozen=True)
class Uniform:
    """A uniformly random cohort without replacement, of those clients that hold data.

    With a `fraction` C of K clients it has max(C K, 1) of them, rounded (ghaemi2022 Algorithm 1).

    >>> import numpy as np
    >>> Uniform(fraction=0.1).size(FederationInfo(np.full(100, 600), 10, (1, 28, 28)))
    10
    """

    clients_per_round: int | None = None
    fraction: float | None = None

    def cohort(self, ctx: RoundContext) -> list[int]:
        """A new draw each round, from the round's own seed."""
        eligible = ctx.eligible
        size = min(self.size(ctx.federation), len(eligible))
        draw = ctx.rng.numpy("select").choice(len(eligible), size, replace=False)
        return [int(client) for client in eligible[draw]]

    def size(self, federation: FederationInfo) -> int:
        """The number of clients a round."""
        return cohort_size(federation, self.clients_per_round, self.fraction)


def cohort_size(federation: FederationInfo, clients_per_round: int | None, fraction: float | None) -> int:
    """How many clients take part: the number asked for, max(C K, 1) of K clients, or all. Only clients with data count.

    Raises `ConfigError` if more clients are asked for than hold data.
    """
    eligible = len(federation.eligible)
    if fraction is not None:
        return min(max(round(fraction * federation.clients), 1), eligible)
    asked = clients_per_round or eligible
    if asked > eligible:
        raise ConfigError(
            f"{asked} clients per round are set, but only {eligible} of the {federation.clients} clients have data",
            where="select.clients_per_round",
            hint=f"take at most {eligible}",
        )
    return asked


@dataclass(frozen=True)
class Poisson:
    """Each client that holds data by itself, with the same probability; perhaps nobody.

    The cohorts of differential privacy: whether a client is in one does not depend on any other client (McMahan et al.
    2018, arXiv 1710.06963, Algorithm 1).

    >>> from fedlens.core.random import Rng
    >>> federation = FederationInfo(np.full(1000, 10), 10, (1, 28, 28))
    >>> cohorts = [Poisson(0.04).cohort(RoundContext(1, 3, federation, Rng((seed,)))) for seed in range(3)]
    >>> [len(cohort) for cohort in cohorts], Poisson(0.04).size(federation)
    ([46, 39, 33], 40)
    """

    fraction: float

    def cohort(self, ctx: RoundContext) -> list[int]:
        """A new draw each round, from the round's own seed, in a random order."""
        draw, eligible = ctx.rng.numpy("select"), ctx.eligible
        cohort: list[int] = draw.permutation(eligible[draw.random(len(eligible)) < self.fraction]).tolist()
        return cohort

    def size(self, federation: FederationInfo) -> int:
        """The expected number of clients, rounded, and at least 1."""
        return max(round(self.fraction * len(federation.eligible)), 1)


@dataclass(frozen=True)
class OnceEach:
    """All clients that hold data in one random order of the run, so many a round, each once before any returns.

    The order comes from the seed alone, also with `[privacy]`, which then hides no cohort. The last cohort of the order
    may be smaller.

    >>> from fedlens.core.random import Rng
    >>> federation, select = FederationInfo(np.full(5, 10), 10, (1, 28, 28)), OnceEach(2)
    >>> [select.cohort(RoundContext(t, 4, federation, Rng((0, "round", t)))) for t in (1, 2, 3, 4)]
    [[0, 1], [4, 2], [3], [0, 1]]
    """

    clients_per_round: int | None = None
    fraction: float | None = None

    def cohort(self, ctx: RoundContext) -> list[int]:
        """The next clients of the order, without those that are not available."""
        size, order = self.size(ctx.federation), self.order(ctx.federation, ctx.rng.key[0])
        at = (ctx.round - 1) % self.cohorts(ctx.federation) * size
        return [k for k in order[at : at + size] if ctx.available is None or k in ctx.available]

    def order(self, federation: FederationInfo, seed: int | str) -> list[int]:
        """The clients in the order of a run with this selection seed."""
        order: list[int] = Rng((seed,)).numpy("once-each").permutation(federation.eligible).tolist()
        return order

    def cohorts(self, federation: FederationInfo) -> int:
        """The number of rounds after which all clients have been asked."""
        return -(-len(federation.eligible) // self.size(federation))

    def size(self, federation: FederationInfo) -> int:
        """The number of clients a round."""
        return cohort_size(federation, self.clients_per_round, self.fraction)


Method = Literal["systematic", "replacement"]


@dataclass(frozen=True)
class BySize:
    """Clients in proportion to their examples: of m draws, client k is expected to have m n_k / n.

    Source: hsu2020 section 5.3 (the probability to be selected is proportional to n_k). Drawing without replacement
    with weights n_k, the obvious way, does not do it: large clients come too seldom.

    - `systematic`: the clients in a random order are laid end to end, n_k long each, and m points n / m apart are
      put on the line, their offset drawn uniformly. A client that is shorter than n / m appears at most once; one
      with m n_k / n above 1 appears that often, rounded down or up.
    - `replacement`: m independent draws with p_k = n_k / n. Any client may appear twice.

    >>> import numpy as np
    >>> from fedlens.core.random import Rng
    >>> federation = FederationInfo(np.array([600, 100, 300, 0]), 10, (1, 28, 28))
    >>> cohort = BySize(2).cohort(RoundContext(1, 1, federation, Rng((0,))))  # client 0: 2 * 600 / 1000 times
    >>> len(cohort), cohort.count(0) in (1, 2), BySize(2).repeats(federation)
    (2, True, True)
    """

    clients_per_round: int | None = None
    fraction: float | None = None
    method: Method = "systematic"

    def cohort(self, ctx: RoundContext) -> list[int]:
        """A new draw each round, from the round's own seed."""
        federation, draw, m = ctx.federation, ctx.rng.numpy("select"), self.size(ctx.federation)
        order = ctx.eligible
        ends = (
            federation.ends if ctx.available is None else np.cumsum(federation.sizes[order], dtype=np.int64)
        )
        if not len(order):
            return []
        n = int(ends[-1])
        if self.method == "replacement":
            # An example at random, and the client that has it.
            at = np.searchsorted(ends, draw.integers(n, size=m), side="right")
        else:
            # A new order each round is a pass over the population, some milliseconds for 100,000 clients: with one
            # order for all rounds, clients that stand next to each other would never meet.
            order = draw.permutation(order)
            ends = np.cumsum(federation.sizes[order], dtype=np.int64)
            # In units of 1/m of an example the points are whole numbers: every probability is exact.
            at = np.searchsorted(ends * m, draw.integers(n) + n * np.arange(m), side="right")
        cohort: list[int] = order[at].tolist()
        return cohort

    def size(self, federation: FederationInfo) -> int:
        """The number of draws a round."""
        return cohort_size(federation, self.clients_per_round, self.fraction)

    def repeats(self, federation: FederationInfo) -> bool:
        """Whether some client may appear twice: with replacement any, else one with more than n / m examples."""
        m = self.size(federation)
        return m > 1 if self.method == "replacement" else m * federation.largest > int(federation.sizes.sum())


@dataclass(frozen=True)
class Everyone:
    """All clients that hold data, every round."""

    def cohort(self, ctx: RoundContext) -> list[int]:
        """All, in order."""
        return [int(client) for client in ctx.eligible]

    def size(self, federation: FederationInfo) -> int:
        """All of them."""
        return len(federation.eligible)


@dataclass(frozen=True)
class Fixed:
    """The same clients every round, in the order given; one may be named twice."""

    clients: tuple[int, ...]

    def cohort(self, ctx: RoundContext) -> list[int]:
        """These clients, without those that are not available."""
        return [k for k in self.clients if ctx.available is None or k in ctx.available]

    def size(self, federation: FederationInfo) -> int:
        """As many as are named."""
        beyond = [client for client in self.clients if client >= federation.clients]
        if beyond:
            raise ConfigError(
                f"there is no client {beyond[0]}: the {federation.clients} clients are numbered from 0",
                where="select.clients",
            )
        return len(self.clients)

    def candidates(self, federation: FederationInfo) -> Sequence[int]:
        """These clients, each once."""
        return sorted(set(self.clients))

    def repeats(self, federation: FederationInfo) -> bool:
        """Whether one is named twice."""
        return len(set(self.clients)) < len(self.clients)


def refuse_all_dropped(local: LocalSettings, select: Select, federation: FederationInfo) -> None:
    """Raises `ConfigError` if every client of every round is a straggler that is dropped."""
    if local.straggler_work != "drop":
        return
    cohort = select.size(federation)
    if round(local.stragglers * cohort) >= cohort:
        raise ConfigError(
            f"all {cohort} clients of each round are stragglers, and local.straggler_work = 'drop' leaves them out",
            where="local.stragglers",
            hint=f"set it below {1 - 0.5 / cohort:g}, or local.straggler_work to 'up-to-E'",
        )


def straggling(local: LocalSettings, cohort: Sequence[int], ctx: RoundContext) -> dict[int, int]:
    """The epochs (or steps) of the stragglers, by slot: those of a share of the cohort, drawn uniformly.

    Li et al. 2020 (arXiv 1812.06127), section 5.2, draw from 1 to E; the code of the authors from 1 to E - 1. Their
    FedAvg drops stragglers, which is 0 here: they are not asked to train. The other clients then have other slots, and
    so other batches than in a run that drops nobody.
    """
    if not local.stragglers:
        return {}
    draw = ctx.rng.numpy("stragglers")
    slots = sorted(draw.choice(len(cohort), round(local.stragglers * len(cohort)), replace=False))
    if local.straggler_work == "drop":
        return {int(slot): 0 for slot in slots}
    most = local.work + (local.straggler_work == "up-to-E")
    return {int(slot): int(draw.integers(1, most)) for slot in slots}


PerRound = Annotated[int | None, Field(ge=1, description="number of clients per round")]
Fraction = Annotated[float | None, Field(gt=0, le=1, description="... or the share of all clients")]


def uniform(*, clients_per_round: PerRound = None, fraction: Fraction = None) -> Uniform:
    """A uniformly random cohort; everyone where neither setting is given."""
    _refuse_both(clients_per_round, fraction)
    return Uniform(clients_per_round, fraction)


def once_each(*, clients_per_round: PerRound = None, fraction: Fraction = None) -> OnceEach:
    """Clients in one random order, each once before any returns; everyone where neither setting is given."""
    _refuse_both(clients_per_round, fraction)
    return OnceEach(clients_per_round, fraction)


def poisson(
    *, fraction: Annotated[float, Field(gt=0, le=1, description="the probability of each client")]
) -> Poisson:
    """Each client by itself, perhaps nobody."""
    return Poisson(fraction)


def by_size(
    *,
    clients_per_round: PerRound = None,
    fraction: Fraction = None,
    method: Annotated[
        Method,
        Field(
            description="systematic: a client appears m n_k / n times in a cohort of m, rounded down or up; "
            "replacement: m independent draws"
        ),
    ] = "systematic",
) -> BySize:
    """A cohort drawn in proportion to the clients' examples; as many draws as clients where neither is given."""
    _refuse_both(clients_per_round, fraction)
    return BySize(clients_per_round, fraction, method)


def _refuse_both(clients_per_round: int | None, fraction: float | None) -> None:
    if clients_per_round is not None and fraction is not None:
        raise ConfigError(
            "clients_per_round and fraction are both set", where="select", hint="set only one of them"
        )


def fixed(
    *,
    clients: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(min_length=1, description="their positions in the partition; a client may be named twice"),
    ],
) -> Fixed:
    """The same clients every round."""
    return Fixed(tuple(clients))


SELECTS = Registry(
    "selection",
    {
        "uniform": Entry(
            "fedlens.algorithms.client_sampling:uniform", "uniformly at random, without replacement"
        ),
        "poisson": Entry(
            "fedlens.algorithms.client_sampling:poisson", "each client by itself, perhaps nobody"
        ),
        "once-each": Entry(
            "fedlens.algorithms.client_sampling:once_each",
            "in one random order of the run, each once before any returns",
        ),
        "by-size": Entry(
            "fedlens.algorithms.client_sampling:by_size", "in proportion to the clients' examples (FedVC)"
        ),
        "all": Entry("fedlens.algorithms.client_sampling:Everyone", "all clients, every round"),
        "fixed": Entry("fedlens.algorithms.client_sampling:fixed", "the same clients every round"),
    },
)
