"""Clients that all look alike."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.data.partition.drawing import check_population, streams
from fedlens.data.partition.partition import Partition


def iid(
    labels: NDArray[Any], seed: int, *, clients: Annotated[int, Field(ge=1, description="number of clients")]
) -> Partition:
    """A random share of all examples for each client: sizes differ by at most one, and nothing is discarded.

    Raises `ConfigError` where there are more clients than examples.

    >>> iid(np.zeros(10, int), 0, clients=4).sizes().tolist()
    [3, 3, 2, 2]
    """
    n = len(labels)
    check_population(n, clients)
    (stream,) = streams(seed, 1)
    sizes = np.full(clients, n // clients)
    sizes[: n % clients] += 1
    owners = np.empty(n, np.int64)
    owners[stream.permutation(n)] = np.repeat(np.arange(clients), sizes)
    return Partition.of_owners(owners, clients, spec={"name": "iid", "clients": clients, "seed": seed})
