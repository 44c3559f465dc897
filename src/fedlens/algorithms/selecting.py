"""Who takes part in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field

from fedlens.core.errors import ConfigError
from fedlens.core.protocol import FederationInfo, RoundContext
from fedlens.core.registry import Entry, Registry


class Select(Protocol):
    """Chooses a round's cohort. A client may appear twice."""

    def cohort(self, ctx: RoundContext) -> list[int]:
        """The clients of this round, in the order of their slots."""
        ...

    def size(self, federation: FederationInfo) -> int:
        """How many take part in a round. Raises `ConfigError` where there are not so many."""
        ...


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
        eligible = ctx.federation.eligible
        draw = ctx.rng.numpy("select").choice(len(eligible), self.size(ctx.federation), replace=False)
        return [int(client) for client in eligible[draw]]

    def size(self, federation: FederationInfo) -> int:
        """The number of clients a round."""
        there = len(federation.eligible)
        if self.fraction is not None:
            return min(max(round(self.fraction * federation.clients), 1), there)
        asked = self.clients_per_round or there
        if asked > there:
            raise ConfigError(
                f"{asked} clients a round are asked for, and {there} of the {federation.clients} clients hold data",
                where="select.clients_per_round",
                hint=f"take at most {there}",
            )
        return asked


@dataclass(frozen=True)
class Everyone:
    """All clients that hold data, every round."""

    def cohort(self, ctx: RoundContext) -> list[int]:
        """All, in order."""
        return [int(client) for client in ctx.federation.eligible]

    def size(self, federation: FederationInfo) -> int:
        """All of them."""
        return len(federation.eligible)


@dataclass(frozen=True)
class Fixed:
    """The same clients every round, in the order given; one may be named twice."""

    clients: tuple[int, ...]

    def cohort(self, ctx: RoundContext) -> list[int]:
        """These clients."""
        return list(self.clients)

    def size(self, federation: FederationInfo) -> int:
        """As many as are named."""
        beyond = [client for client in self.clients if client >= federation.clients]
        if beyond:
            raise ConfigError(
                f"client {beyond[0]} is asked for, and there are {federation.clients}, numbered from 0",
                where="select.clients",
            )
        return len(self.clients)


def uniform(
    *,
    clients_per_round: Annotated[int | None, Field(ge=1, description="how many take part in a round")] = None,
    fraction: Annotated[
        float | None, Field(gt=0, le=1, description="... or which share of the population")
    ] = None,
) -> Uniform:
    """A uniformly random cohort; everyone where neither setting is given."""
    if clients_per_round is not None and fraction is not None:
        raise ConfigError(
            "clients_per_round and fraction are both set", where="select", hint="give one of them"
        )
    return Uniform(clients_per_round, fraction)


def everyone() -> Everyone:
    """All clients, every round."""
    return Everyone()


def fixed(
    *,
    clients: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(min_length=1, description="their rows in the partition; one may stand twice"),
    ],
) -> Fixed:
    """The same clients every round."""
    return Fixed(tuple(clients))


SELECTS = Registry(
    "selection",
    {
        "uniform": Entry("fedlens.algorithms.selecting:uniform", "uniformly random, without replacement"),
        "all": Entry("fedlens.algorithms.selecting:everyone", "everyone, every round"),
        "fixed": Entry("fedlens.algorithms.selecting:fixed", "the same clients every round"),
    },
)
