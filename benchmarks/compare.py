"""fedlens against the limit: the same workload, round about, in one run.

A pair is one round of bare PyTorch and one of fedlens, in turn; the figure is the median of the pairs' ratios of
speed, with a 95 % interval from the order statistics. Training alone is timed: what a round's line in metrics.jsonl
calls `seconds`.

    python benchmarks/compare.py                       # every workload, every arrangement
    python benchmarks/compare.py linear --pairs 30
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.limit import WORKLOADS, BareLimit, BatchedLinear, Workload
from fedlens.core.gate import Gate, Tally
from fedlens.core.protocol import ClientStates, Program, RoundContext
from fedlens.core.seeding import Rng
from fedlens.experiment.build import build, plan
from fedlens.experiment.config import read_config
from fedlens.experiment.sources import Source

MODELS = {"cifar-cnn": "hsu-cnn", "mnist-cnn": "mcmahan-cnn", "linear": "linear"}


class Fedlens:
    """Rounds of fedlens's FedAvg on a workload."""

    def __init__(
        self,
        workload: Workload,
        engine: str,
        threads: int,
        workers: int,
        algorithm: str | dict[str, Any] = "fedavg",
    ) -> None:
        settings = {
            "rounds": 1_000_000,
            "data": {
                "dataset": {
                    "name": "synthetic",
                    "shape": list(workload.shape),
                    "train": workload.clients * workload.examples,
                    "test": 10,
                },
                "partition": {"name": "iid", "clients": workload.clients},
            },
            "model": MODELS[workload.name],
            "algorithm": algorithm,
            "select": {"clients_per_round": workload.cohort},
            "local": {"lr": workload.lr, "epochs": workload.epochs, "batch_size": workload.batch},
            "engine": {"name": engine, "threads": threads}
            | ({"workers": workers} if engine in ("processes", "ray") else {}),
        }
        self.built = build(plan(read_config(settings), Source(settings)), Path(), download=False)
        self.number = 0
        states = ClientStates()
        self.built.engine.open(Program(self.built.algorithm.ops, self.built.holders, 0), states)
        self.gate = Gate(self.built.engine, states)
        self.state = self.built.algorithm.init(self.built.model, self.built.federation)

    def round(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """One round; its time in seconds, by default of the wall."""
        self.number += 1
        self.gate.tally = Tally()
        context = RoundContext(self.number, 1_000_000, self.built.federation, Rng((0, "round", self.number)))
        start = clock()
        self.state = self.gate.drive(self.built.algorithm.round(self.state, context), self.number)
        seconds = clock() - start
        assert self.gate.tally.failed == 0
        return seconds

    def close(self) -> None:
        """Ends the workers."""
        self.built.engine.close()


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from the order statistics (binomial, normal approximation)."""
    ordered, n = sorted(ratios), len(ratios)
    reach = math.ceil(0.98 * math.sqrt(n))
    return ordered[max(0, n // 2 - reach)], ordered[min(n - 1, n // 2 + reach)]


def compare(
    workload: Workload, engine: str, processes: int, threads: int, pairs: int, by_hand: bool = False
) -> dict[str, float | str]:
    """Medians of alternating pairs, after a warm-up round each; `by_hand` is against a batched product."""
    limit = BatchedLinear(workload, threads) if by_hand else BareLimit(workload, processes, threads)
    ours = Fedlens(workload, engine, threads, processes)
    try:
        limit.round(), ours.round()
        times = [(limit.round(), ours.round()) for _ in range(pairs)]
    finally:
        ours.close()
        limit.close()
    ratios = [bare / own for bare, own in times]
    low, high = interval(ratios)
    bare, own = (statistics.median(side) for side in zip(*times, strict=True))
    return {
        "workload": workload.name,
        "engine": engine,
        "processes": processes,
        "threads": threads,
        "pairs": pairs,
        "limit_images_per_s": workload.images / bare,
        "fedlens_images_per_s": workload.images / own,
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "overhead_ms_per_client": 1000 * (own - bare) / workload.cohort,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="fedlens against bare PyTorch.")
    parser.add_argument("workload", nargs="*", choices=[*WORKLOADS, []], help="default: all")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--engines", nargs="*", default=["inline-1", "inline-all", "processes"])
    parser.add_argument("--json", type=Path, help="write the rows here")
    asked = parser.parse_args()
    cores = os.cpu_count() or 1
    arrangements = {
        "inline-1": ("inline", 1, 1),
        "inline-all": ("inline", 1, cores),
        "processes": ("processes", cores, 1),
        "ray": ("ray", cores, 1),
        "vectorized": ("vectorized", 1, 1),
        "vectorized-by-hand": ("vectorized", 1, 1),  # against the hand-batched product
    }
    rows = []
    for name in asked.workload or WORKLOADS:
        for arrangement in asked.engines:
            engine, processes, threads = arrangements[arrangement]
            by_hand = arrangement.endswith("by-hand")
            row = compare(WORKLOADS[name], engine, processes, threads, asked.pairs, by_hand)
            rows.append(row)
            print(
                f"{name:10} {arrangement:18} {processes} x {threads}   "
                f"limit {row['limit_images_per_s']:9,.0f} images/s   "
                f"fedlens {row['fedlens_images_per_s']:9,.0f}   ratio {row['ratio']:.3f} "
                f"[{row['low']:.3f}, {row['high']:.3f}]   overhead {row['overhead_ms_per_client']:.2f} ms a client",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
