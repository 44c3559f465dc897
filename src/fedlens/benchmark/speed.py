"""Measures fedlens and bare PyTorch on one workload in alternating turns of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.benchmark import arrangements
from fedlens.benchmark.arrangements import Arrangement
from fedlens.benchmark.comparison import ComparisonRow, rows_of
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.interleave import Measurement, failure_recorded, take_turns
from fedlens.benchmark.limit import WORKLOADS, BareLimit, BatchedLinear, Workload, linear
from fedlens.engines.devices import usable_cores

Say = Callable[[str], None]
Others = Callable[[Workload, int, Say], Sequence[Measurement]]


def workload(name: str) -> Workload:
    """The workload of this name. Raises `ConfigError` where it does not exist."""
    if name not in WORKLOADS:
        raise ConfigError(
            f"unknown workload '{name}'",
            where="fedlens bench",
            hint=nearest(name, [*WORKLOADS, "profile", "speed"]),
        )
    return WORKLOADS[name]


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is measured beside the limit.

    Attributes:
        engines: `[engine]` tables; an empty one is fedlens by default.
        turns: how many turns each workload takes, or fewer where `budget` seconds do not suffice.
        others: further candidates of a workload, on so many cores.
    """

    engines: Sequence[Mapping[str, Any]]
    turns: int = 12
    budget: float | None = None
    others: Others = lambda workload, cores, say: ()


def measure(
    workload: Workload,
    plan: BenchmarkPlan,
    say: Say = lambda sentence: None,
    cores: int | None = None,
) -> list[ComparisonRow]:
    """The rows of one workload: the limit in each memory layout, code written by hand, engines, and other candidates.

    Each runs in the fastest arrangement of processes and threads, which a short trial finds; fedlens by default chooses
    by itself. A candidate that does not run has a row with the reason. `say` reports progress.
    """
    cores = cores or usable_cores()
    measurements = [_limit(each, cores, say) for each in layouts(workload)]
    if workload.model is linear:
        measurements.append(_by_hand(workload, cores, say))
    measurements += [_engine(workload, table, cores, say) for table in plan.engines]
    measurements += plan.others(workload, cores, say)
    ready = [measurement for measurement in measurements if measurement.ran]
    take_turns(ready, plan.turns, plan.budget, lambda sentence: say(f"{workload.name}: {sentence}"))
    return rows_of(workload, measurements)


def layouts(workload: Workload) -> list[Workload]:
    """The workload in each memory layout: of convolutions also with channels last."""
    return [workload] if workload.model is linear else [workload, replace(workload, channels_last=True)]


def _limit(workload: Workload, cores: int, say: Say) -> Measurement:
    name = f"limit, {_layout(workload)}"
    say(f"{workload.name}: arranging the {name}")
    way = arrangements.best_of_limit(workload, cores)
    start = partial(BareLimit, workload, way.processes, way.threads, apart=True)
    return Measurement(name, "limit", start, about(workload, way))


def _by_hand(workload: Workload, cores: int, say: Say) -> Measurement:
    say(f"{workload.name}: arranging the batched product")
    way = arrangements.best_by_hand(workload, cores)
    start = partial(BatchedLinear, workload, way.threads)
    return Measurement("bmm by hand", "by hand", start, about(workload, way))


def _engine(workload: Workload, table: Mapping[str, Any], cores: int, say: Say) -> Measurement:
    if not table:
        start = partial(Federation, workload, {})
        return Measurement("fedlens by default", "fedlens", start, {"default": True})
    settings = {key: value for key, value in table.items() if key != "name"}
    name = " ".join([f"fedlens {table['name']}", *(f"{key}={value}" for key, value in settings.items())])
    say(f"{workload.name}: arranging {name}")
    measurement = Measurement(name, "fedlens", partial(Federation, workload, table))
    with failure_recorded(measurement):
        table = arrangements.best_of_engine(workload, table, cores)
        measurement.start = partial(Federation, workload, table)
    return measurement


def about(workload: Workload, way: Arrangement) -> dict[str, Any]:
    """What the row of a candidate says of its arrangement."""
    arranged = {"processes": way.processes, "threads": way.threads, "layout": _layout(workload)}
    return {**arranged, "device": workload.device}


def _layout(workload: Workload) -> str:
    return "channels last" if workload.channels_last else "contiguous"
