"""How long partitions take: python benchmarks/partition.py"""

from __future__ import annotations

import time

import numpy as np

from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.iid import iid
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.shards import shards


def main() -> None:
    """Prints one line a case: seconds to draw the partition, and its EMD."""
    for examples, clients in ((50_000, 10_000), (1_000_000, 10_000)):
        for classes in (10, 1000):
            labels = np.arange(examples) % classes
            _case(labels, clients, "iid", lambda y, k: iid(y, 0, clients=k))
            _case(labels, clients, "shards, distinct", lambda y, k: shards(y, 0, clients=k))
            _case(labels, clients, "shards, mcmahan", lambda y, k: shards(y, 0, clients=k, scheme="mcmahan"))
            for alpha in (0.0, 0.1, 100.0, float("inf")):
                _case(
                    labels,
                    clients,
                    f"dirichlet {alpha:g}",
                    lambda y, k, a=alpha: dirichlet(y, 0, clients=k, alpha=a),
                )


def _case(labels: np.ndarray, clients: int, name: str, make) -> None:
    start = time.perf_counter()
    partition: Partition = make(labels, clients)
    seconds = time.perf_counter() - start
    what = f"{len(labels):>9,} examples, {labels.max() + 1:>4} classes, {clients:,} clients"
    print(f"{what}  {name:<18} {seconds:7.3f} s   EMD {partition.emd(labels):.3f}")


if __name__ == "__main__":
    main()
