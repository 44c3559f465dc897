"""Finds the fastest arrangement of processes and threads by measuring."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedlens.base.registry import read_settings, settings_model
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.interleave import fastest
from fedlens.benchmark.limit import BareLimit, BatchedLinear, Workload
from fedlens.engines.registry import ENGINES
from fedlens.settings.config_source import Source, override

_TRIAL_IMAGES = 2_000  # of a trial round, about


@dataclass(frozen=True, order=True)
class Arrangement:
    """A number of processes, and the threads of each."""

    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


def arrangements(cores: int) -> list[Arrangement]:
    """The arrangements that use all cores, or half of them, as two may share one arithmetic unit.

    >>> [str(one) for one in arrangements(4)]
    ['1 x 2', '1 x 4', '2 x 1', '2 x 2', '4 x 1']
    """
    totals = {cores, max(1, cores // 2)}
    ways = {Arrangement(n, total // n) for total in totals for n in range(1, total + 1) if total % n == 0}
    return sorted(ways)


def trial(workload: Workload) -> Workload:
    """A smaller workload with a round's cohort, large enough to tell which arrangement is fast."""
    batches = max(1, _TRIAL_IMAGES // (workload.cohort * workload.epochs * workload.batch))
    examples = min(workload.examples, batches * workload.batch)
    return replace(workload, clients=workload.cohort, examples=examples)


def best_of_limit(workload: Workload, cores: int) -> Arrangement:
    """The fastest arrangement of bare PyTorch: on all cores, or in one to four processes of a GPU."""
    small = trial(workload)
    on_gpu = [Arrangement(n, 1) for n in (1, 2, 4) if n <= cores]

    def start(way: Arrangement) -> BareLimit:
        return BareLimit(small, way.processes, way.threads, apart=True)

    return fastest(arrangements(cores) if workload.device == "cpu" else on_gpu, start)


def best_by_hand(workload: Workload, cores: int) -> Arrangement:
    """The fastest arrangement of the batched product written by hand, which is one process."""
    small = trial(workload)
    ways = in_one(cores) if workload.device == "cpu" else [Arrangement(1, 1)]
    return fastest(ways, lambda a: BatchedLinear(small, a.threads))


def engine_table(text: str) -> dict[str, Any]:
    """The `[engine]` table of an argument `NAME` or `NAME:KEY=VALUE:KEY=VALUE`, with values as in TOML.

    `default` is an empty table: nothing about the engine is set.

    Raises `ConfigError` where the engine or a setting does not exist, or a value is invalid.

    >>> engine_table("processes:workers=2:threads=1")
    {'name': 'processes', 'workers': 2, 'threads': 1}
    """
    if text == "default":
        return {}
    name, *settings = re.split(r":(?=\w+=)", text)  # a value may contain colons
    table = override(Source({}), settings).values
    read_settings(ENGINES.find(name, where="--engines"), table, where="--engines")
    return {"name": name, **table}


def best_of_engine(workload: Workload, table: Mapping[str, Any], cores: int) -> dict[str, Any]:
    """The table with the fastest `workers` and `threads`, where the engine has them and they are not set."""
    settings = settings_model(ENGINES.find(table["name"])).model_fields
    free = [key for key in ("workers", "threads") if key in settings and key not in table]
    ways = arrangements(cores) if "workers" in settings else in_one(cores)
    values = [{"workers": way.processes, "threads": way.threads} for way in ways]
    tables = [{**table, **{key: value[key] for key in free}} for value in values]
    different = [one for number, one in enumerate(tables) if one not in tables[:number]]
    small = trial(workload)
    return fastest(different, lambda one: Federation(small, one))


def in_one(cores: int) -> list[Arrangement]:
    """The arrangements of one process on this many cores; a small model may be faster with few threads.

    >>> [str(one) for one in in_one(6)]
    ['1 x 1', '1 x 2', '1 x 4', '1 x 6']
    """
    threads = {1, cores, *(2**n for n in range(1, cores.bit_length()) if 2**n <= cores)}
    return [Arrangement(1, n) for n in sorted(threads)]
