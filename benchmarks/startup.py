"""Measures what a run costs around the training: start-up time, and memory as the population grows.

    python benchmarks/startup.py

Times are medians of warm starts, measured from outside. Memory is the peak of the process, as the operating system
reports it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEDLENS = [
    sys.executable,
    "-c",
    "import sys; from fedlens.cli.main import main; sys.argv[0] = 'fedlens'; main()",
]
POPULATION = """
name = "population"
rounds = 3
model = "linear"
[data]
dataset = {{ name = "synthetic", shape = [3, 32, 32], train = 50000, test = 1000 }}
partition = {{ name = "iid", clients = {clients} }}
[select]
clients_per_round = 10
[local]
lr = 0.1
"""


def seconds(command: list[str]) -> float:
    """The seconds of a command."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_round(scratch: Path, number: int) -> float:
    """The seconds from the command to the line of the first round of `digits`."""
    start = time.perf_counter()
    command = [*FEDLENS, "run", "digits", "--rounds", "1", "--out", str(scratch / f"digits-{number}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("round 1/"):
                took = time.perf_counter() - start
                process.wait()
                return took
    raise RuntimeError("the run printed no line for its first round")


def peak_memory(scratch: Path, clients: int) -> float:
    """The peak memory of a run with this many clients, in MiB."""
    recipe = scratch / f"{clients}.toml"
    recipe.write_text(POPULATION.format(clients=clients))
    command = [*FEDLENS, "run", str(recipe), "--out", str(scratch / f"population-{clients}"), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss / 1024


def main() -> None:
    """Prints the figures."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        helps = [seconds([*FEDLENS, "--help"]) for _ in range(7)]
        print(f"fedlens --help                     {statistics.median(helps):6.2f} s")
        pairs = [(seconds([sys.executable, "-c", "import torch"]), first_round(scratch, n)) for n in range(7)]
        torch, run = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"import torch                       {torch:6.2f} s")
        print(f"command to first round of digits   {run:6.2f} s, {run - torch:.2f} s more than import torch")
        few, many = peak_memory(scratch, 100), peak_memory(scratch, 10_000)
        print(f"peak memory, 100 clients           {few:6.0f} MiB")
        print(f"peak memory, 10,000 clients        {many:6.0f} MiB, {many - few:+.0f} MiB")


if __name__ == "__main__":
    main()
