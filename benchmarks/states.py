"""Measures client states beyond memory: peak memory and seconds of a round, and that results stay the same.

    python -m benchmarks.states                     # 200 clients of 10 MB each, 200 MiB of them in memory
    python -m benchmarks.states --clients 40 --megabytes 1 --memory 4 --rounds 16 --engine processes

All clients take part in turn, so each state is read, replaced and written again before its client is next: the worst
order for a budget that keeps the states used last. Memory is the peak of the process that drives the run, as the
operating system reports it. Run directories are in a temporary folder or in `--scratch`, which should be on a disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.algorithms.averaging import Averaging, Parts, averaging
from fedlens.core.protocol import FederationInfo, RoundContext
from fedlens.local.rules import ClientRule, LocalContext

FEDLENS = [
    sys.executable,
    "-c",
    "import sys; from fedlens.cli.main import main; sys.argv[0] = 'fedlens'; main()",
]
SETTINGS = """
name = "states"
rounds = {rounds}
data = {{ dataset = "digits", partition = {{ name = "iid", clients = {clients} }} }}
model = "linear"
local = {{ lr = 0.1 }}
algorithm = {algorithm}
engine = {{ name = "{engine}", state_memory = {memory} }}
evaluation = {{ every = 1000 }}
checkpoint = {{ seconds = {checkpoint} }}
"""
ALL = 1_000_000  # MiB: more than any machine has


@dataclass(frozen=True)
class InTurn:
    """One cohort after the other, so that every client takes part equally often."""

    number: int

    def cohort(self, ctx: RoundContext) -> list[int]:
        """The next clients."""
        first = (ctx.round - 1) * self.number
        return [(first + k) % ctx.federation.clients for k in range(self.number)]

    def size(self, federation: FederationInfo) -> int:
        """The number of clients a round."""
        return self.number

    def repeats(self, federation: FederationInfo) -> bool:
        """Never, with this many clients."""
        return False


def lean(gradients: list[Tensor], parameters: list[Tensor], visit: LocalContext) -> list[Tensor]:
    """Gradients that depend on the client's state, so that a wrong state changes the model."""
    past = visit.state.get("memory")
    if past is None:
        return gradients
    return [g + 0.1 * past[: g.numel()].view_as(g) for g in gradients]


def remembering(size: int) -> ClientRule:
    """A rule whose clients keep `size` numbers, all of which change whenever they take part."""

    def finish(parameters: list[Tensor], visit: LocalContext) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        past = visit.state.get("memory")
        moved = torch.cat([(a - p).flatten() for a, p in zip(visit.anchor, parameters, strict=True)])
        moved = moved.repeat(-(-size // moved.numel()))[:size]
        return {}, {"memory": moved if past is None else past.roll(1).mul_(0.9).add_(moved)}

    return ClientRule(grad=lean, finish=finish)


def heavy(parts: Parts, *, megabytes: int = 10, cohort: int = 10) -> Averaging:
    """FedAvg with clients that keep a large state."""
    return averaging(parts, select=InTurn(cohort), client=remembering(megabytes * 250_000))


def light(parts: Parts, *, cohort: int = 10) -> Averaging:
    """FedAvg without states."""
    return averaging(parts, select=InTurn(cohort))


@dataclass(frozen=True)
class Measured:
    """One run."""

    name: str
    peaks: list[float]  # MiB, one for each process that drove it
    rounds: list[float]  # seconds, in the second half
    elapsed: float
    model: str
    spilled: float  # MB in files at the end

    def __str__(self) -> str:
        peaks = " and ".join(f"{peak:,.0f}" for peak in self.peaks)
        took = statistics.median(self.rounds) * 1000
        text = f"{self.name:28} peak {peaks} MiB, round {took:,.0f} ms, {self.elapsed:.0f} s in all"
        return text + (f", {self.spilled:,.0f} MB in files" if self.spilled else "")


def measured(
    name: str, asked: argparse.Namespace, scratch: Path, memory: int, kill_after: int = 0
) -> Measured:
    """Runs the recipe; kills it after `kill_after` rounds and resumes it, if that is not 0."""
    cohort = asked.cohort
    large = f'{{ name = "benchmarks.states:heavy", megabytes = {asked.megabytes}, cohort = {cohort} }}'
    small = f'{{ name = "benchmarks.states:light", cohort = {cohort} }}'
    file, out = scratch / f"{name}.toml", scratch / name
    file.write_text(
        SETTINGS.format(
            rounds=asked.rounds,
            clients=asked.clients,
            algorithm=large if memory else small,
            engine=asked.engine,
            memory=memory or ALL,
            checkpoint=asked.checkpoint,
        )
    )
    began = time.perf_counter()
    commands = [["run", str(file), "--out", str(out), "--quiet"]]
    if kill_after:
        commands.append(["resume", str(out), "--quiet"])
    peaks = [peak(command, out, kill_after if n == 0 else 0) for n, command in enumerate(commands)]
    elapsed = time.perf_counter() - began
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Measured(
        name,
        peaks,
        [line["seconds"] for line in lines[len(lines) // 2 :]],
        elapsed,
        hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        sum(path.stat().st_size for path in (out / "states").glob("*")) / 1e6,
    )


def peak(command: list[str], out: Path, kill_after: int) -> float:
    """The peak memory of a command in MiB; it is killed once `kill_after` rounds are written."""
    process = subprocess.Popen([*FEDLENS, *command], stdout=subprocess.DEVNULL)
    metrics = out / "metrics.jsonl"
    while kill_after and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") > kill_after:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    _, status, usage = os.wait4(process.pid, 0)
    if status != (signal.SIGKILL if kill_after else 0):
        raise SystemExit(f"'fedlens {' '.join(command)}' ended with {status}")
    return usage.ru_maxrss / 1024


def main() -> None:
    """Prints the figures; exits with an error where the final models differ."""
    parser = argparse.ArgumentParser(description="Measures client states beyond memory.")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=10, help="the state of a client")
    parser.add_argument("--memory", type=int, default=200, help="engine.state_memory, MiB")
    parser.add_argument("--cohort", type=int, default=10, help="clients a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--checkpoint", type=float, default=10, help="seconds between checkpoints")
    parser.add_argument("--engine", default="inline", choices=["inline", "processes"])
    parser.add_argument("--scratch", type=Path, help="where the run directories go")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        scratch = Path(folder)
        print(measured("without state", asked, scratch, 0))
        whole = measured("all states in memory", asked, scratch, ALL)
        print(whole)
        spilled = measured("spilled", asked, scratch, asked.memory)
        print(spilled)
        killed = measured("spilled, killed and resumed", asked, scratch, asked.memory, asked.rounds // 2)
        print(killed)
    if not whole.model == spilled.model == killed.model:
        raise SystemExit("the final models differ")
    print("the three final models are the same to the bit")


if __name__ == "__main__":
    main()
