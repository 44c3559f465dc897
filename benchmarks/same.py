"""Checks that the peers do the limit's work: after each round, their weights have the norm of the limit's weights.

Every client takes part and holds many copies of one image, so neither the cohort nor the order of images is random.
The number of steps matters: two epochs of two full batches and a short one. A peer that lets its user choose the memory
layout is checked in both. In FedML's first round, which the benchmark does not count, each client continues from the
weights of the last; there the limit does the same. Exits with code 1 where a norm differs.

    python -m benchmarks.same                     # creates missing environments
    python -m benchmarks.same pfl --peers-dir DIR
"""

from __future__ import annotations

import argparse
import math
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from benchmarks.peer import PeerProcess, installed, known_peers, usual_directory
from fedlens.benchmark.limit import Learner, Workload, fresh_weights, mnist_cnn
from fedlens.engines.devices import usable_cores

ROUNDS = 3
OFF = 1e-5  # of a norm, at most; another batch size, or an epoch more or less, moves it by more than 1e-4
WORKLOAD = Workload(
    "same",
    mnist_cnn,
    clients=4,
    examples=50,
    shape=(1, 28, 28),
    cohort=4,
    batch=20,
    epochs=2,
    lr=0.1,
    alike=True,
)
CHAINED_AT_FIRST = {"fedml"}


def norms_of_limit(chained_at_first: bool) -> list[float]:
    """The norm of the weights after each round of the limit's learner."""
    learner, weights, norms = Learner(WORKLOAD, *WORKLOAD.tensors()), fresh_weights(WORKLOAD), []
    for number in range(ROUNDS):
        total, start = [torch.zeros_like(weight) for weight in weights], weights
        for client in range(WORKLOAD.clients):
            learner.train(start, client, seed=0)
            learner.add_to(total, 1 / WORKLOAD.clients)
            if chained_at_first and number == 0:
                start = [parameter.detach().clone() for parameter in learner.parameters]
        weights = total
        norms.append(math.sqrt(sum(float(weight.double().square().sum()) for weight in weights)))
    return norms


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Whether the peers do the limit's work.")
    parser.add_argument("peers", nargs="*", help="default: all")
    parser.add_argument("--peers-dir", type=Path, default=usual_directory())
    asked = parser.parse_args()
    wrong = False
    for peer in known_peers():
        if asked.peers and peer.name not in asked.peers:
            continue
        limit = norms_of_limit(peer.name in CHAINED_AT_FIRST)
        python = installed(peer, asked.peers_dir, print)
        workloads = [WORKLOAD, *([replace(WORKLOAD, channels_last=True)] if peer.channels_last else [])]
        for workload, way in product(workloads, peer.ways(usable_cores())):
            candidate, off = PeerProcess(peer, python, workload, way), []
            layout = "channels last" if workload.channels_last else "contiguous"
            with closing(candidate):
                for norm in limit:
                    candidate.round()
                    off.append(abs(candidate.reply["norm"] - norm))
            wrong |= max(off) > OFF
            print(
                f"{peer.title}, {layout}, {way}: norms {limit[0]:.6f} to {limit[-1]:.6f}, off by at most {max(off):.1e}"
                f"{'' if max(off) <= OFF else ': NOT the same work'}",
                flush=True,
            )
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
