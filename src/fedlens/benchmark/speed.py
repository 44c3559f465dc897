"""fedlens beside bare PyTorch and beside its peers on one workload, round about in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedlens.benchmark import arrangements
from fedlens.benchmark.arrangements import Arrangement
from fedlens.benchmark.contest import Lane, fastest, out_if_it_fails, take_turns
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.limit import WORKLOADS, BareLimit, BatchedLinear, Workload, linear
from fedlens.benchmark.peer import Driven, Peer, installed, torch_version
from fedlens.benchmark.rows import Row, rows_of
from fedlens.core.errors import ConfigError, nearest
from fedlens.engines.devices import usable_cores


def workload(name: str) -> Workload:
    """The workload of this name. Raises `ConfigError` where there is none."""
    if name not in WORKLOADS:
        raise ConfigError(
            f"there is no workload '{name}'",
            where="fedlens bench",
            hint=nearest(name, [*WORKLOADS, "profile", "speed"]),
        )
    return WORKLOADS[name]


@dataclass(frozen=True)
class Asked:
    """What is to be measured: engines as tables, peers, and where the peers' environments are.

    `turns` pairs of every workload, or as many as `budget` seconds allow.
    """

    engines: Sequence[Mapping[str, Any]]
    peers: Sequence[Peer] = ()
    peers_dir: Path = Path()
    turns: int = 12
    budget: float | None = None


def measure(
    workload: Workload,
    asked: Asked,
    say: Callable[[str], None] = lambda sentence: None,
    cores: int | None = None,
) -> list[Row]:
    """The rows of one workload: bare PyTorch first, then what is written by hand, engines, and peers.

    Each is in the arrangement that is the fastest on this machine; `say` hears what goes on. What does not run has
    a row that says why.
    """
    cores = cores or usable_cores()
    lanes = [_limit(workload, cores, say)]
    if workload.model is linear:
        lanes.append(_by_hand(workload, cores, say))
    lanes += [_engine(workload, table, cores, say) for table in asked.engines]
    lanes += [_peer(workload, peer, asked.peers_dir, cores, say) for peer in asked.peers]
    ready = [lane for lane in lanes if lane.ran]
    take_turns(ready, asked.turns, asked.budget, lambda sentence: say(f"{workload.name}: {sentence}"))
    return rows_of(workload, lanes)


def _limit(workload: Workload, cores: int, say: Callable[[str], None]) -> Lane:
    say(f"{workload.name}: arranging bare PyTorch")
    way = arrangements.best_of_limit(workload, cores)
    start = partial(BareLimit, workload, way.processes, way.threads, apart=True)
    return Lane("bare PyTorch", "limit", start, _about(way))


def _by_hand(workload: Workload, cores: int, say: Callable[[str], None]) -> Lane:
    say(f"{workload.name}: arranging the batched product")
    way = arrangements.best_by_hand(workload, cores)
    return Lane("bmm by hand", "by hand", partial(BatchedLinear, workload, way.threads), _about(way))


def _engine(workload: Workload, table: Mapping[str, Any], cores: int, say: Callable[[str], None]) -> Lane:
    own = {key: value for key, value in table.items() if key != "name"}
    name = " ".join([f"fedlens {table['name']}", *(f"{key}={value}" for key, value in own.items())])
    say(f"{workload.name}: arranging {name}")
    lane = Lane(name, "fedlens", partial(Federation, workload, table))
    with out_if_it_fails(lane):
        table = arrangements.best_of_engine(workload, table, cores)
        lane.start = partial(Federation, workload, table)
    return lane


def _peer(workload: Workload, peer: Peer, directory: Path, cores: int, say: Callable[[str], None]) -> Lane:
    def start(way: Arrangement) -> Driven:
        return Driven(peer, python, small, way)

    small = arrangements.trial(workload)
    lane = Lane(peer.title, "peer", lambda: Driven(peer, python, workload, way))
    with out_if_it_fails(lane):
        python = installed(peer, directory, say)
        ways = peer.ways(cores)
        if len(ways) > 1:
            say(f"{workload.name}: arranging {peer.title}")
        way = fastest(ways, start)
        lane.about = {**_about(way), "requirements": list(peer.requirements), "torch": torch_version()}
    return lane


def _about(way: Arrangement) -> dict[str, Any]:
    return {"processes": way.processes, "threads": way.threads}
