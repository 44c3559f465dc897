"""Measures fedlens, bare PyTorch and peers on one workload in alternating turns of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError, nearest
from fedlens.benchmark import arrangements
from fedlens.benchmark.arrangements import Arrangement
from fedlens.benchmark.comparison import ComparisonRow, rows_of
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.interleave import Measurement, failure_recorded, fastest, take_turns
from fedlens.benchmark.limit import WORKLOADS, BareLimit, BatchedLinear, Workload, linear
from fedlens.benchmark.peer import Peer, PeerProcess, installed, torch_version
from fedlens.engines.devices import usable_cores


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
    """The engines and peers to measure.

    Attributes:
        engines: `[engine]` tables; an empty one is fedlens by default.
        peers_dir: the directory of the peers' environments.
        turns: how many turns each workload takes, or fewer where `budget` seconds do not suffice.
    """

    engines: Sequence[Mapping[str, Any]]
    peers: Sequence[Peer] = ()
    peers_dir: Path = Path()
    turns: int = 12
    budget: float | None = None


def measure(
    workload: Workload,
    plan: BenchmarkPlan,
    say: Callable[[str], None] = lambda sentence: None,
    cores: int | None = None,
) -> list[ComparisonRow]:
    """The rows of one workload: the limit in each memory layout, code written by hand, engines, and peers.

    Each runs in the fastest arrangement of processes and threads, which a short trial finds; fedlens by default chooses
    by itself. A peer runs as documented and, for convolutions, also with channels last where its interface allows it.
    A candidate that does not run has a row with the reason. `say` reports progress.
    """
    cores = cores or usable_cores()
    layouts = [workload] if workload.model is linear else [workload, replace(workload, channels_last=True)]
    measurements = [_limit(each, cores, say) for each in layouts]
    if workload.model is linear:
        measurements.append(_by_hand(workload, cores, say))
    measurements += [_engine(workload, table, cores, say) for table in plan.engines]
    for peer in plan.peers:
        tried = layouts if peer.channels_last else layouts[:1]
        measurements += [_peer(each, peer, plan.peers_dir, cores, say) for each in tried]
    ready = [measurement for measurement in measurements if measurement.ran]
    take_turns(ready, plan.turns, plan.budget, lambda sentence: say(f"{workload.name}: {sentence}"))
    return rows_of(workload, measurements)


def _limit(workload: Workload, cores: int, say: Callable[[str], None]) -> Measurement:
    name = f"limit, {_layout(workload)}"
    say(f"{workload.name}: arranging the {name}")
    way = arrangements.best_of_limit(workload, cores)
    start = partial(BareLimit, workload, way.processes, way.threads, apart=True)
    return Measurement(name, "limit", start, _about(workload, way))


def _by_hand(workload: Workload, cores: int, say: Callable[[str], None]) -> Measurement:
    say(f"{workload.name}: arranging the batched product")
    way = arrangements.best_by_hand(workload, cores)
    start = partial(BatchedLinear, workload, way.threads)
    return Measurement("bmm by hand", "by hand", start, _about(workload, way))


def _engine(
    workload: Workload, table: Mapping[str, Any], cores: int, say: Callable[[str], None]
) -> Measurement:
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


def _peer(
    workload: Workload, peer: Peer, directory: Path, cores: int, say: Callable[[str], None]
) -> Measurement:
    def start(way: Arrangement) -> PeerProcess:
        return PeerProcess(peer, python, small, way)

    small = arrangements.trial(workload)
    title = f"{peer.title}, channels last" if workload.channels_last else peer.title
    measurement = Measurement(title, "peer", lambda: PeerProcess(peer, python, workload, way))
    with failure_recorded(measurement):
        python = installed(peer, directory, say)
        ways = peer.ways(cores)
        if len(ways) > 1:
            say(f"{workload.name}: arranging {title}")
        way = fastest(ways, start)
        requirements = {"requirements": list(peer.requirements), "torch": torch_version()}
        measurement.about = {**_about(workload, way), "peer": peer.title, **requirements}
    return measurement


def _about(workload: Workload, way: Arrangement) -> dict[str, Any]:
    about = {"processes": way.processes, "threads": way.threads, "layout": _layout(workload)}
    return about | {"device": workload.device}


def _layout(workload: Workload) -> str:
    return "channels last" if workload.channels_last else "contiguous"
