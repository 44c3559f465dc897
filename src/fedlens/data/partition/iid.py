"""A random share of all examples for each client, and the IID twin of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.core.random import derive
from fedlens.data.partition.drawing import check_population, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.settings import Clients, Exponent, Sigma
from fedlens.data.partition.sizes import LAWS, draw_sizes, law_setting, refuse_unused
from fedlens.data.table import Table


def iid(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    sizes: Annotated[
        Literal["equal", "log-normal", "power-law"] | list[Annotated[int, Field(ge=1)]],
        Field(description="'equal', 'log-normal', 'power-law', or the examples of each client"),
    ] = "equal",
    sigma: Sigma = None,
    exponent: Exponent = None,
    minimum: Annotated[
        int | None, Field(ge=1, description="minimum number of examples per client; by default 1")
    ] = None,
) -> Partition:
    """A random share of all examples for each client.

    `sizes` are equal (they differ by at most one), by a law (`fedlens.data.partition.sizes.draw_sizes`), or
    given, a whole number for each client. Discarded, at random: the examples that given sizes leave; otherwise none.

    Because the draw is random, a small client's classes differ from the population's by chance. `quantity` gives
    clients that differ only in size.

    Raises `ConfigError` if there are more clients than examples, given sizes do not fit, or a setting is given that
    these `sizes` do not use.

    >>> iid(np.zeros(10, int), 0, clients=4).sizes().tolist()
    [3, 3, 2, 2]
    >>> iid(np.zeros(10, int), 0, clients=2, sizes=[7, 1]).sizes().tolist()
    [7, 1]
    """
    n = len(Table.of(labels))
    check_population(n, clients)
    shuffling, drawing = streams(seed, 2)
    settings = {"sigma": sigma, "exponent": exponent, "minimum": minimum}
    each, recipe = _sizes(n, clients, sizes, settings, drawing)
    owners = np.full(n, -1, np.int64)
    owners[shuffling.permutation(n)[: each.sum()]] = np.repeat(np.arange(clients), each)
    return Partition.of_owners(
        owners, clients, spec={"name": "iid", "clients": clients, **recipe, "seed": seed}
    )


def _sizes(
    n: int,
    clients: int,
    sizes: str | Sequence[int],
    settings: dict[str, Any],
    stream: np.random.RandomState,
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """(int64 [clients], the settings of the sizes for the spec)."""
    if not isinstance(sizes, str):
        refuse_unused("given", settings)
        each = _given(sizes, n, clients)
        return each, {"sizes": each.tolist()}
    if sizes == "equal":
        refuse_unused(sizes, settings)
        return n // clients + (np.arange(clients) < n % clients), {}
    if sizes not in ("log-normal", "power-law"):
        raise ConfigError(
            f"unknown sizes '{sizes}'",
            where="sizes",
            hint="use 'equal', 'log-normal', 'power-law' or whole numbers",
        )
    minimum = settings.pop("minimum") or 1
    own = law_setting(sizes, settings)
    each = draw_sizes(n, clients, sizes, stream, parameter=own[LAWS[sizes][0]], minimum=minimum)
    return each, {"sizes": sizes, **own, "minimum": minimum}


def _given(sizes: Sequence[int], n: int, clients: int) -> NDArray[np.int64]:
    each = np.asarray(sizes)
    if each.ndim != 1 or each.dtype.kind not in "iu" or each.min(initial=1) < 1:
        raise ConfigError("sizes must be integers of at least 1", where="sizes")
    if len(each) != clients:
        raise ConfigError(
            f"{len(each)} sizes are given for {clients} clients",
            where="sizes",
            hint=f"set clients to {len(each)}",
        )
    if each.sum() > n:
        raise ConfigError(
            f"the sizes sum to {each.sum()}, but there are only {n} examples",
            where="sizes",
            hint="use smaller sizes",
        )
    return each.astype(np.int64)


def reassigned(partition: Partition, seed: int) -> Partition:
    """The partition with its examples reassigned to the clients uniformly at random.

    Each client keeps its name and its number of examples; the pool of examples stays the same. Image features of
    clients are dropped, so that all clients see the images alike. What a run on the partition loses against a run on
    its twin is the cost of how the examples are distributed, at equal sizes.

    >>> p = reassigned(Partition.of_owners([0, 0, 0, 1, 1, -1], 2), seed=0)
    >>> p.sizes().tolist(), sorted(p.indices.tolist())
    ([3, 2], [0, 1, 2, 3, 4])
    """
    (stream,) = streams(derive(seed, "reassign"), 1)
    order = stream.permutation(partition.indices)
    owners = partition.owners()
    indices = order[np.lexsort((order, owners))]  # the examples of a client in ascending order
    return replace(
        partition,
        indices=indices.astype(np.int64),
        spec={**partition.spec, "reassigned": True},
        features={},
        census=None,
    )
