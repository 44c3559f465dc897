"""The memory that training one client takes, by the operating system's account: in a process that does nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from fedlens.benchmark.profile_clock import on_gpu
from fedlens.core.protocol import Ask, ClientDataSource, ClientId, Failure, Id, Payload, Program, Request
from fedlens.core.registry import load_file, user_files
from fedlens.engines.devices import Computing
from fedlens.engines.executor import Executor, Item
from fedlens.engines.memory import keep_freed_memory

if TYPE_CHECKING:
    from fedlens.experiment.build import Built

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        before: the process with PyTorch, the model that was sent, and the client's data.
        training: what the largest moment of training adds to it.
        gpu: the largest moment on the GPU, its caches left out; None on a CPU.
        examples, batch: of the client.
    """

    before: int
    training: int
    gpu: int | None
    examples: int
    batch: int


@dataclass(frozen=True)
class _Alone(ClientDataSource):
    """The data of one client, and of nobody else."""

    data: Any

    def holder(self, client: ClientId) -> Any:
        return self.data


def measure_memory(built: Built, ask: Ask, state: Payload) -> Memory | str:
    """Trains the largest client of an ask in a process of its own; what was in the way, in words, where that fails."""
    request = max(ask.requests, key=lambda request: len(built.holders.holder(request.client)))
    data = _compact(built.holders.holder(request.client))
    path = [entry or os.getcwd() for entry in sys.path]
    program = Program({ask.op: built.algorithm.ops[ask.op]}, _Alone(data), 0)
    try:
        job = cloudpickle.dumps(
            (
                built.engine.applied(program),
                Ask(ask.op, [request], ask.shared, ask.expect),
                state,
                built.config.engine.get("threads", 1),
            )
        )
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fedlens.benchmark.profile_memory"],
            input=cloudpickle.dumps((path, user_files(), job)),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            check=False,
        )
    except Exception as error:
        return f"it cannot be sent to another process: {type(error).__name__}: {error}"
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return last[-1] if last else f"the process ended with {done.returncode} (out of memory?)"
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    batch = built.config.local.batch(found["examples"])
    return Memory(**found, batch=batch)


def _compact(data: Any) -> Any:
    """The holder's data without that of everybody else."""
    if data.indices is None:
        return replace(data, validation=None)
    at = torch.arange(len(data.indices))
    return replace(data, examples=data.examples.take(data.indices), indices=at, validation=None)


def main() -> None:
    """Reads a job on standard input, does it, and prints what it took as one line of JSON."""
    path, files, job = cloudpickle.loads(sys.stdin.buffer.read())
    sys.path[:] = path
    for file in files:
        load_file(Path(file))
    program, ask, state, threads = cloudpickle.loads(job)
    del job
    torch.set_num_threads(threads)
    Computing(program.device, program.arithmetic.precision, program.arithmetic.channels_last).begin()
    keep_freed_memory()
    _warm_up(program.device)
    request: Request = ask.requests[0]
    examples = len(program.data.holder(request.client))
    item = Item(Id(1, 0, 0), request.client, request.payload, state)
    before = _begin()
    answer = Executor(program).answer(ask.op, ask.shared, item, ask.expect)
    training = max(0, _most() - before)
    if isinstance(answer, Failure):
        sys.exit(f"the client failed: {answer.reason}")
    gpu = torch.cuda.max_memory_allocated() if on_gpu() else None
    found = {"before": before, "training": training, "gpu": gpu, "examples": examples}
    sys.stdout.write(json.dumps(found) + "\n")


def _warm_up(device: str) -> None:
    """Loads the libraries that the first layer would load: they belong to PyTorch and not to the client."""
    layer = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Flatten(), torch.nn.Linear(1, 1)).to(
        device
    )
    torch.autograd.grad(layer(torch.zeros(1, 1, 1, 1, device=device)).sum(), list(layer.parameters()))


def _begin() -> int:
    """What the process has now; from here on `_most` tells the largest."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR.write_text("5")  # of Linux: the largest so far is now
    except OSError:
        sys.exit("this system does not tell the largest memory since a moment (/proc/self/clear_refs)")
    return _status("VmRSS")


def _most() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    """Bytes of this line of the process's status."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
