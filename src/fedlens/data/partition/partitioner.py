"""A decorator for partitioners: checks the settings by their annotations, and records them in the partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from fedlens.base.registry import read_settings
from fedlens.data.partition.partition import Partition

Make = TypeVar("Make", bound=Callable[..., Partition])


def partitioner(make: Make) -> Make:
    """Checks the settings of a partitioner `make(labels, seed, *, <settings>)`, and records them with the seed.

    The `spec` of the partition is the name of the function, its settings and the seed, in this order. A `spec` that
    `make` returns goes first: for a setting that it resolved, such as a size that was None, or one more fact. A `spec`
    with a name is complete.

    The decorated function raises `ConfigError` if a setting contradicts its annotation, or is unknown or missing.

    >>> from typing import Annotated
    >>> import numpy as np
    >>> from pydantic import Field
    >>> @partitioner
    ... def one_client(labels, seed: int, *, size: Annotated[int | None, Field(ge=1)] = None) -> Partition:
    ...     return Partition.of_owners(np.zeros(len(labels), int), 1, spec={"size": size or len(labels)})
    >>> one_client([5, 6], 0).spec
    {'name': 'one-client', 'size': 2, 'seed': 0}
    >>> one_client([5, 6], 0, size=0)
    Traceback (most recent call last):
    fedlens.base.errors.ConfigError: 'size' is 0, but must be at least 1 (size).
    """

    @wraps(make)
    def checked(labels: Any, seed: int, **settings: Any) -> Partition:
        values: dict[str, Any] = read_settings(make, settings, "")
        partition = make(labels, seed, **values)
        if "name" in partition.spec:
            return partition
        lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        spec = {"name": make.__name__.replace("_", "-"), **lists, "seed": seed, **partition.spec}
        return replace(partition, spec=spec)

    return cast(Make, checked)
