"""Measures the speed of bare PyTorch on this machine, by arrangement, and with one setting changed at a time.

python -m benchmarks.limit                         # every workload, in the usual arrangements
python -m benchmarks.limit mnist-cnn --processes 2 --threads 1 --rounds 7
python -m benchmarks.limit --variants linear       # which optimizer and which use of memory are the fastest
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fedlens.benchmark.limit import WORKLOADS, BareLimit, Workload


def speeds(limits: Sequence[BareLimit], rounds: int) -> list[list[float]]:
    """Images per second of every limit in every round: taken in turn, after one round each to warm up."""
    for limit in limits:
        limit.round()
    rows = [[limit.workload.images / limit.round() for limit in limits] for _ in range(rounds)]
    return [list(column) for column in zip(*rows, strict=True)]


def report(limits: Sequence[BareLimit], names: Sequence[str], rounds: int) -> None:
    """Prints the median and the range of each limit, and ends them."""
    for limit, name, column in zip(limits, names, speeds(limits, rounds), strict=True):
        middle, low, high = statistics.median(column), min(column), max(column)
        print(f"{limit.workload.name:10} {name:25} {middle:9,.0f} images/s   {low:,.0f} to {high:,.0f}")
        limit.close()


def variants(workload: Workload) -> tuple[list[Workload], list[str]]:
    """The workload as it is, and with one thing changed at a time."""
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "SGD forloop": {"optimizer": "forloop"},
        "SGD foreach": {"optimizer": "foreach"},
        "SGD fused": {"optimizer": "fused"},
        "channels last": {"channels_last": True},
        "freed memory given back": {"keep_memory": False},
    }
    if workload.name == "linear":
        del changes["channels last"]
    return [replace(workload, **change) for change in changes.values()], list(changes)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What bare PyTorch reaches on this machine.")
    parser.add_argument("workload", nargs="*", help=f"any of: {', '.join(WORKLOADS)}; all of them by default")
    parser.add_argument(
        "--processes", type=int, help="processes (default: 1, and as many as there are cores)"
    )
    parser.add_argument(
        "--threads", type=int, help="threads of each process (default: 1, and all in one process)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument(
        "--variants", action="store_true", help="compare optimizers and memory layouts instead"
    )
    asked = parser.parse_args()
    if unknown := [name for name in asked.workload if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]}; known: {', '.join(WORKLOADS)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"torch {torch.__version__}, {cores} cores, medians of {asked.rounds} rounds taken in turn")
    for workload in [WORKLOADS[name] for name in asked.workload or WORKLOADS]:
        if asked.variants:
            processes, threads = asked.processes or 1, asked.threads or 1
            loads, names = variants(workload)
            limits = [BareLimit(load, processes, threads, apart=True) for load in loads]
        else:
            if asked.processes or asked.threads:
                shapes = [(asked.processes or 1, asked.threads or 1)]
            else:
                shapes = sorted({(1, 1), (1, cores), (cores, 1)})
            limits = [BareLimit(workload, p, t) for p, t in shapes]
            names = [f"{p} process{'es' * (p > 1)} x {t} thread{'s' * (t > 1)}" for p, t in shapes]
        report(limits, names, asked.rounds)


if __name__ == "__main__":
    main()
