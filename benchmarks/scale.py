"""Measures rounds in which few of many clients take part: seconds of a round and of the first, and peak memory.

    python -m benchmarks.scale                                        # 10,000 to 1,000,000 clients, 1,000 a round
    python -m benchmarks.scale --clients 100000 --engines vectorized

The linear model on images of 8 x 8, two per client, so that only the number of clients grows. Seconds are those in the
run's metrics, medians without the first round. Memory is that of all processes; a page shared by n of them counts 1/n
for each. The goal, at 100,000 clients: a round under 5 s and a peak below 2.5 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.heavy import peak

SETTINGS = """
name = "scale"
rounds = {rounds}
model = "linear"
[data]
dataset = {{ name = "synthetic", shape = [1, 8, 8], train = {images}, test = 1000 }}
partition = {{ name = "iid", clients = {clients} }}
[select]
clients_per_round = {cohort}
[local]
lr = 0.1
batch_size = 10
[evaluation]
every = {rounds}
[engine]
{engine}
"""
ENGINES = {
    "inline": 'name = "inline"',
    "vectorized": 'name = "vectorized"',
    "processes": 'name = "processes"',
    "processes, group 50": 'name = "processes"\ngroup = 50',
}


def main() -> None:
    """Prints a row for each number of clients and each engine."""
    parser = argparse.ArgumentParser(description="Rounds of many clients.")
    parser.add_argument("--clients", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for clients in asked.clients:
            for name in asked.engines:
                text = SETTINGS.format(
                    rounds=asked.rounds,
                    images=2 * clients,
                    clients=clients,
                    cohort=asked.cohort,
                    engine=ENGINES[name],
                )
                run = peak(text, Path(folder))
                lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
                rounds = [line["seconds"] for line in lines if line["round"] > 1]
                before = run.seconds - (lines[-1]["elapsed"] - lines[0]["elapsed"])
                print(
                    f"{clients:9,} clients, {asked.cohort:,} a round, {name:20} "
                    f"{statistics.median(rounds):6.2f} s a round, {before:5.1f} s around the rounds, "
                    f"peak {run.most / 2**20:,.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
