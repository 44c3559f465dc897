"""How many workers there are, and which device each of them computes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from fedlens.core.errors import RunFailed
from fedlens.engines.computing import Computing

_PER_GPU = 2  # workers of one GPU: one computes while the other reads batches or sends
_FREE = (
    "import json, torch; "
    "print(json.dumps([torch.cuda.mem_get_info(k)[0] for k in range(torch.cuda.device_count())]))"
)


def usable_cores() -> int:
    """The cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(computing: Computing, threads: int) -> int:
    """One worker a core, or two a GPU."""
    cores = max(1, usable_cores() // threads)
    if not computing.device.startswith("cuda"):
        return cores
    gpus = torch.cuda.device_count() if computing.device == "cuda" else 1
    return max(1, min(cores, _PER_GPU * gpus))


def devices_of(device: str, workers: int) -> list[str]:
    """The device of each worker: `device`, or for 'cuda' the GPUs by the memory that they have free.

    Raises `RunFailed` where the GPUs cannot be asked.
    """
    if device != "cuda":
        return [device] * workers
    gpus = torch.cuda.device_count()
    free = _free_memory() if gpus > 1 else [1]
    return [f"cuda:{k}" for k in placed(free, workers)]


def placed(free: Sequence[int], workers: int) -> list[int]:
    """Which GPU each worker goes to: always the one that leaves it the largest share of free memory.

    Args:
        free: the bytes that each GPU has free.

    >>> placed([80, 80, 30], 5)
    [0, 1, 0, 1, 2]
    """
    there = [0] * len(free)
    found = []
    for _ in range(workers):
        best = max(range(len(free)), key=lambda k: (free[k] / (there[k] + 1), -k))
        there[best] += 1
        found.append(best)
    return found


def _free_memory() -> list[int]:
    """The bytes free on each GPU, asked for in a process of its own: asking takes half a gigabyte of each."""
    asked = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no answer"])[-1]
        raise RunFailed(f"the GPUs cannot be asked for their memory: {last}", hint="see what nvidia-smi says")
    found: list[int] = json.loads(asked.stdout)
    return found
