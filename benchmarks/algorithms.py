"""Times a round of each algorithm against a round of FedAvg in the same run.

A pair is one round of FedAvg and one of the other, in turn, over the same cohort of the same clients: hsu2019's CNN,
500 images a client in batches of 32, one local epoch, one client a round, one thread in one process. The CPU time of
the process is measured, so that other work on the machine matters less. The figure is the median of the pairs' ratios
with its 95 % interval.

    python -m benchmarks.algorithms                       # every algorithm, about six minutes of one idle core
    python -m benchmarks.algorithms scaffold moon --pairs 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.benchmark.comparison import interval
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.limit import WORKLOADS, Workload

# In most rounds of a run, clients have taken part before. With few clients, all have a state after the warm-up.
WORKLOAD = Workload(**{**vars(WORKLOADS["cifar-cnn"]), "clients": 3, "cohort": 1})
WARM = 4

# The settings that make an algorithm differ from FedAvg.
CASES: dict[str, Mapping[str, Any]] = {
    "fedavgm": {"name": "fedavgm"},
    "fedprox": {"name": "fedprox", "mu": 0.1},
    "fedir": {"name": "fedir"},
    "fedvc": {"name": "fedvc", "examples": 512},
    "fedadagrad": {"name": "fedadagrad"},
    "fedadam": {"name": "fedadam"},
    "fedyogi": {"name": "fedyogi"},
    "fednova": {"name": "fednova"},
    "scaffold": {"name": "scaffold"},
    "scaffold, option I": {"name": "scaffold", "option": "I"},
    "feddyn": {"name": "feddyn"},
    "moon": {"name": "moon"},
    "mime": {"name": "mime"},
    "mimelite": {"name": "mimelite"},
    "feddane": {"name": "feddane"},
    "liadmm": {"name": "liadmm"},
    "iceadmm": {"name": "iceadmm"},
}
LEFT_OUT = {
    "fedavg": "the reference of the others",
    "centralized": "no rounds of clients",
    "admm": "solves to a tolerance: its cost is the tolerance's",
    "ceadmm": "solves to a tolerance: its cost is the tolerance's",
    "fedbn": "FedAvg of some of the layers",
    "local-only": "no averaging",
    "dsgd": "peers mix without a server",
    "push-sum": "peers mix without a server",
    "gradient-tracking": "peers mix without a server",
    "splitfed": "two parts in turn: see benchmarks.protocols",
    "split-relay": "two parts in turn: see benchmarks.protocols",
    "fedgkt": "two networks: see benchmarks.protocols",
    "fednas": "searches a network of its own: see benchmarks.protocols",
    "fedma": "a training for each layer: see benchmarks.protocols",
    "vertical": "parties have parts of the images: see benchmarks.protocols",
    "finetune": "FedAvg; tuning is part of the evaluation",
}


def measure(case: Mapping[str, Any], pairs: int) -> dict[str, float]:
    """Medians over alternating pairs of rounds."""
    base, other = (
        Federation(WORKLOAD, {"name": "inline"}, algorithm) for algorithm in ({"name": "fedavg"}, dict(case))
    )
    try:
        for _ in range(WARM):
            base.round(), other.round()
        clock = time.process_time
        times = [(base.round(clock), other.round(clock)) for _ in range(pairs)]
    finally:
        base.close()
        other.close()
    ratios = [theirs / plain for plain, theirs in times]
    low, high = interval(ratios)
    return {
        "seconds": statistics.median(other for _, other in times),
        "fedavg_seconds": statistics.median(plain for plain, _ in times),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Times rounds of every algorithm against FedAvg's.")
    parser.add_argument("algorithm", nargs="*", help=f"of: {', '.join(CASES)}; default: all")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the rows here")
    asked = parser.parse_args()
    unknown = set(ALGORITHMS) - {str(case["name"]) for case in CASES.values()} - set(LEFT_OUT)
    assert not unknown, f"no case for {sorted(unknown)}"
    rows = {}
    for name in asked.algorithm or CASES:
        rows[name] = row = measure(CASES[name], asked.pairs)
        print(
            f"{name:20} {1000 * row['seconds']:8.0f} ms   FedAvg {1000 * row['fedavg_seconds']:8.0f} ms   "
            f"ratio {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            flush=True,
        )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
