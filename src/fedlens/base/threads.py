"""Runs a function over many files in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> list[Result]:
    """`function` of each item, in the order of the items. By default one thread for each core of this process.

    >>> map_threads(len, ["a", "bcd"])
    [1, 3]
    """
    with ThreadPoolExecutor(threads or own_cores()) as pool:
        return list(pool.map(function, items))


def usable_cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Share:
    cores: int | None = None


def share_cores(cores: int) -> None:
    """Limits this process to a share of the cores, because other workers use the rest."""
    _Share.cores = max(1, cores)


def own_cores() -> int:
    """The number of cores that this process may use besides other workers; `usable_cores` if it is alone."""
    return usable_cores() if _Share.cores is None else min(_Share.cores, usable_cores())
