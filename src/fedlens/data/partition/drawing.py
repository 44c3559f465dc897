"""Random streams of the partitioners, which are the same in every NumPy version, and checks of their sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.table import Table


def streams(seed: int, count: int) -> list[np.random.RandomState]:
    """`count` independent streams of `seed`.

    `RandomState` is frozen by NumPy's policy on streams (NEP 19), unlike `Generator`: the same seed gives the
    same partition in every version. Its generator here is PCG64.

    Raises `ConfigError` if the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"the seed is {seed}, but must be at least 0")
    children = np.random.SeedSequence(seed).spawn(count)
    return [np.random.RandomState(np.random.PCG64(child)) for child in children]


def check_population(examples: int, clients: int) -> None:
    """Raises `ConfigError` if there are fewer examples than clients, or no client."""
    if clients < 1:
        raise ConfigError(f"clients is {clients}, but must be at least 1", where="clients")
    if clients > examples:
        raise ConfigError(
            f"{clients} clients are more than the {examples} examples",
            where="clients",
            hint=f"set clients to at most {examples}",
        )


def check_classes(labels: Table | NDArray[Any]) -> NDArray[np.int64]:
    """The labels as int64 [n].

    Raises `DataError` if they are not one class per example, `ConfigError` if the examples of a table have several.
    """
    return Table.of(labels).labels


def equal_size(size: int | None, available: int, clients: int) -> int:
    """The number of examples of each client: `size`, or an equal share of the `available` examples.

    Raises `ConfigError` if there are too few examples.
    """
    check_population(available, clients)
    each = available // clients if size is None else size
    if each * clients > available:
        raise ConfigError(
            f"{clients} clients of {each} need {clients * each} examples, but there are only {available}",
            where="size",
            hint=f"set a size of at most {available // clients}",
        )
    return each
