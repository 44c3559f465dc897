"""How a machine's cores are shared out: processes x threads, measured and not assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedlens.benchmark.federation import Federation
from fedlens.benchmark.interleave import fastest
from fedlens.benchmark.limit import BareLimit, BatchedLinear, Workload
from fedlens.core.registry import read_settings, settings_model
from fedlens.engines import ENGINES
from fedlens.experiment.config_source import Source, override

_TRIAL_IMAGES = 2_000  # of a round that is tried, about


@dataclass(frozen=True, order=True)
class Arrangement:
    """So many processes of so many threads each."""

    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


def arrangements(cores: int) -> list[Arrangement]:
    """The ways to use all cores, or every other one where two share an arithmetic unit, without a rest.

    >>> [str(one) for one in arrangements(4)]
    ['1 x 2', '1 x 4', '2 x 1', '2 x 2', '4 x 1']
    """
    totals = {cores, max(1, cores // 2)}
    ways = {Arrangement(n, total // n) for total in totals for n in range(1, total + 1) if total % n == 0}
    return sorted(ways)


def trial(workload: Workload) -> Workload:
    """The same workload with as few images as tell which arrangement is fast, shared out as those of a round are."""
    batches = max(1, _TRIAL_IMAGES // (workload.cohort * workload.epochs * workload.batch))
    examples = min(workload.examples, batches * workload.batch)
    return replace(workload, clients=workload.cohort, examples=examples)


def best_of_limit(workload: Workload, cores: int) -> Arrangement:
    """The arrangement in which bare PyTorch is the fastest."""
    small = trial(workload)

    def start(way: Arrangement) -> BareLimit:
        return BareLimit(small, way.processes, way.threads, apart=True)

    return fastest(arrangements(cores), start)


def best_by_hand(workload: Workload, cores: int) -> Arrangement:
    """Likewise of the batched product written by hand, which is one process."""
    small = trial(workload)
    return fastest(in_one(cores), lambda a: BatchedLinear(small, a.threads))


def engine_table(text: str) -> dict[str, Any]:
    """The table [engine] that a command line means: `NAME` or `NAME:KEY=VALUE:KEY=VALUE`, values as in TOML.

    `default` is an empty table: nothing about the engine is set.

    Raises `ConfigError` where there is no such engine, a setting is not one, or a value is not good.

    >>> engine_table("processes:workers=2:threads=1")
    {'name': 'processes', 'workers': 2, 'threads': 1}
    """
    if text == "default":
        return {}
    name, *settings = re.split(r":(?=\w+=)", text)  # a value may have colons of its own
    table = override(Source({}), settings).values
    read_settings(ENGINES.find(name, where="--engines"), table, where="--engines")
    return {"name": name, **table}


def best_of_engine(workload: Workload, table: Mapping[str, Any], cores: int) -> dict[str, Any]:
    """The table with `workers` and `threads` as they are the fastest, where it has them and they are not set."""
    known = settings_model(ENGINES.find(table["name"])).model_fields
    free = [key for key in ("workers", "threads") if key in known and key not in table]
    ways = arrangements(cores) if "workers" in known else in_one(cores)
    values = [{"workers": way.processes, "threads": way.threads} for way in ways]
    tables = [{**table, **{key: value[key] for key in free}} for value in values]
    different = [one for number, one in enumerate(tables) if one not in tables[:number]]
    small = trial(workload)
    return fastest(different, lambda one: Federation(small, one))


def in_one(cores: int) -> list[Arrangement]:
    """The ways to use up to so many cores in one process, whose threads may be too many for a small model.

    >>> [str(one) for one in in_one(6)]
    ['1 x 1', '1 x 2', '1 x 4', '1 x 6']
    """
    threads = {1, cores, *(2**n for n in range(1, cores.bit_length()) if 2**n <= cores)}
    return [Arrangement(1, n) for n in sorted(threads)]
