"""Times partitions: python benchmarks/partition.py [part of a name]"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.dirichlet_classwise import dirichlet_classwise
from fedlens.data.partition.iid import iid
from fedlens.data.partition.natural import natural
from fedlens.data.partition.pachinko import pachinko
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.quantity import quantity
from fedlens.data.partition.s2 import s2
from fedlens.data.partition.shards import shards
from fedlens.data.table import Table

Make = Callable[[Table, int], Partition]

BY_CLASS: list[tuple[str, Make]] = [
    ("iid", lambda t, k: iid(t, 0, clients=k)),
    ("iid, log-normal", lambda t, k: iid(t, 0, clients=k, sizes="log-normal")),
    ("quantity, power-law", lambda t, k: quantity(t, 0, clients=k, sizes="power-law")),
    ("shards, distinct", lambda t, k: shards(t, 0, clients=k)),
    ("shards, mcmahan", lambda t, k: shards(t, 0, clients=k, scheme="mcmahan")),
    ("dirichlet 0", lambda t, k: dirichlet(t, 0, clients=k, alpha=0.0)),
    ("dirichlet 0.1", lambda t, k: dirichlet(t, 0, clients=k, alpha=0.1)),
    ("dirichlet 100", lambda t, k: dirichlet(t, 0, clients=k, alpha=100.0)),
    ("dirichlet inf", lambda t, k: dirichlet(t, 0, clients=k, alpha=float("inf"))),
    ("dirichlet-classwise 0.01", lambda t, k: dirichlet_classwise(t, 0, clients=k, alpha=0.01)),
    ("dirichlet-classwise 0.1", lambda t, k: dirichlet_classwise(t, 0, clients=k, alpha=0.1)),
    ("  balance", lambda t, k: dirichlet_classwise(t, 0, clients=k, alpha=0.1, balance=True)),
    ("pachinko 0.1, 10", lambda t, k: pachinko(t, 0, clients=k)),
]


def main(only: str = "") -> None:
    """Prints one line a case: seconds to draw the partition, and its EMD."""
    for examples, clients in ((50_000, 10_000), (1_000_000, 10_000)):
        for classes in (10, 1000):
            table = Table.of(np.arange(examples) % classes, coarse=np.arange(classes) // 5)
            for name, make in BY_CLASS:
                _case(table, name, lambda t, k=clients, make=make: make(t, k), only)
    table = _users(1_000_000, 100_000)
    _case(table, "natural, numbers", lambda t: natural(t, 0, column="number"), only)
    _case(table, "natural, text", lambda t: natural(t, 0), only)
    table = _places(580_000)
    for n_max in (100, 3000, 30_000):
        _case(table, f"s2 {n_max}", lambda t, n_max=n_max: s2(t, 0, n_max=n_max), only)


def _users(examples: int, users: int) -> Table:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, users, examples)
    columns = {"number": numbers, "client": np.array([f"user{number:06d}" for number in numbers])}
    return Table.of(rng.integers(0, 1000, examples), columns)


def _places(examples: int) -> Table:
    """Coordinates, all different, in clusters from 100 m to 500 km wide."""
    rng = np.random.default_rng(0)
    centres = np.stack([rng.uniform(-60, 75, 300), rng.uniform(-180, 180, 300)], axis=1)
    spread = rng.choice([0.001, 0.1, 1.0, 5.0], (examples, 1))
    place = centres[rng.geometric(0.02, examples) % 300] + spread * rng.normal(0, 1, (examples, 2))
    columns = {"lat": place[:, 0].clip(-90, 90), "lon": (place[:, 1] + 180) % 360 - 180}
    return Table.of(rng.integers(0, 1203, examples), columns)


def _case(table: Table, name: str, make: Callable[[Table], Partition], only: str) -> None:
    if only not in name:
        return
    start = time.perf_counter()
    partition = make(table)
    seconds = time.perf_counter() - start
    what = f"{len(table):>9,} examples, {len(table.classes):>4} classes, {len(partition):>7,} clients"
    print(f"{what}  {name:<24} {seconds:7.3f} s   EMD {partition.emd(table):.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
