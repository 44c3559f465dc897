"""Whether the peers do the limit's work: after each round their weights have the norm of the limit's weights.

Every client takes part with one full batch, so that neither the cohort nor the order of images is left to chance. The
first round is left out, as the benchmark leaves it out.

    python -m benchmarks.same                     # environments that are not there yet are made
    python -m benchmarks.same pfl --peers-dir DIR
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from pathlib import Path

from fedlens.benchmark.limit import BareLimit, Workload, mnist_cnn
from fedlens.benchmark.peer import Driven, installed, known_peers, usual_directory
from fedlens.engines.processes import usable_cores

ROUNDS = 3
WORKLOAD = Workload("same", mnist_cnn, clients=4, examples=20, shape=(1, 28, 28), cohort=4, batch=20, lr=0.1)


def norms_of_limit() -> list[float]:
    """The norm of the weights after each round of bare PyTorch."""
    limit, norms = BareLimit(WORKLOAD), []
    for _ in range(ROUNDS):
        limit.round()
        norms.append(math.sqrt(sum(float(weight.double().square().sum()) for weight in limit.weights)))
    return norms


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Whether the peers do the limit's work.")
    parser.add_argument("peers", nargs="*", help="default: all")
    parser.add_argument("--peers-dir", type=Path, default=usual_directory())
    asked = parser.parse_args()
    limit = norms_of_limit()
    steps = [after - before for before, after in pairwise(limit)]
    print("bare PyTorch: the norm changes by " + ", ".join(f"{step:.6f}" for step in steps))
    for peer in known_peers():
        if asked.peers and peer.name not in asked.peers:
            continue
        python = installed(peer, asked.peers_dir, print)
        for way in peer.ways(usable_cores()):
            contestant, norms = Driven(peer, python, WORKLOAD, way), []
            for _ in range(ROUNDS):
                contestant.round()
                norms.append(contestant.said["norm"])
            contestant.close()
            steps = [after - before for before, after in pairwise(norms)]
            told = ", ".join(f"{step:.6f}" for step in steps)
            off = abs(norms[-1] - limit[-1])
            print(f"{peer.title}, {way}: the norm changes by {told}; off by {off:.1e} in the end", flush=True)


if __name__ == "__main__":
    main()
