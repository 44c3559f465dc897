"""A hundred thousand clients: 200,000 synthetic images 3x32x32, from the command to the first round.

    python -m benchmarks.many_clients [--partition iid|dirichlet-classwise] [--engine inline|processes]

Prints the seconds of the partition alone, the seconds of a run from the command to its first trained round, those of
`import torch`, and the driver's peak memory as the operating system reports it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedlens.data.partition.registry import PARTITIONS
from fedlens.data.table import Table

FEDLENS = [
    sys.executable,
    "-c",
    "import sys; from fedlens.cli.main import main; sys.argv[0] = 'fedlens'; main()",
]
IMAGES, CLIENTS = 200_000, 100_000
SETTINGS = {"iid": {}, "dirichlet-classwise": {"alpha": 0.5}}
RECIPE = """
name = "many-clients"
rounds = 3
model = "linear"
[data]
dataset = {{ name = "synthetic", shape = [3, 32, 32], train = {images}, test = 1000 }}
partition = {{ name = "{name}", clients = {clients}{more} }}
[select]
clients_per_round = 100
[local]
lr = 0.1
[engine]
name = "{engine}"
"""


def partition_seconds(name: str) -> float:
    """The median of three draws."""
    table = Table.of(np.random.RandomState(0).randint(0, 10, IMAGES))
    times = []
    for seed in range(3):
        start = time.perf_counter()
        PARTITIONS.find(name)(table, seed, clients=CLIENTS, **SETTINGS[name])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(scratch: Path, name: str, engine: str) -> tuple[float, float]:
    """(seconds from the command to the line of the first trained round, MiB at the peak)."""
    recipe = scratch / "many-clients.toml"
    more = "".join(f", {key} = {value}" for key, value in SETTINGS[name].items())
    recipe.write_text(RECIPE.format(images=IMAGES, clients=CLIENTS, name=name, more=more, engine=engine))
    start = time.perf_counter()
    command = [*FEDLENS, "run", str(recipe), "--out", str(scratch / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    first = float("nan")
    for line in process.stdout:
        if line.startswith("round 1/"):
            first = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError("the run failed")
    return first, usage.ru_maxrss / 1024


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partition", choices=sorted(SETTINGS), default="iid")
    parser.add_argument("--engine", choices=["inline", "processes"], default="inline")
    given = parser.parse_args()
    print(f"{IMAGES:,} images over {CLIENTS:,} clients, {given.partition}, {given.engine}")
    print(f"partition                  {partition_seconds(given.partition):8.2f} s")
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    print(f"import torch               {time.perf_counter() - start:8.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        first, peak = run(Path(folder), given.partition, given.engine)
    print(f"command to first round     {first:8.2f} s")
    print(f"peak memory of the driver  {peak:8.0f} MiB")


if __name__ == "__main__":
    main()
