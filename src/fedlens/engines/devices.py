"""Device, number format and memory layout of an engine, and how many workers share which device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import AfterValidator, Field

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.base.threads import usable_cores as usable_cores
from fedlens.core.arithmetic import Arithmetic, Layout, Precision
from fedlens.core.protocol import Program
from fedlens.engines.hardware import hardware

GPU_CONTEXT = 2**29  # bytes of a GPU that each process takes before the first tensor
_PER_GPU = 2  # workers per GPU: one computes while the other reads batches or sends
_FREE = (
    "import json, torch; "
    "print(json.dumps([torch.cuda.mem_get_info(k)[0] for k in range(torch.cuda.device_count())]))"
)


def valid_device(name: str) -> str:
    """The name if it is valid for a device. Raises `ValueError` otherwise."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name) is None:
        raise ValueError("must be 'auto', 'cpu', 'cuda', or 'cuda:' and a number, e.g. 'cuda:1'")
    return name


Device = Annotated[
    str,
    AfterValidator(valid_device),
    Field(
        description="'auto': the GPUs of the machine, or else its processor; 'cpu', 'cuda', 'cuda:1' and so on. The "
        "run's config.toml records the choice"
    ),
]
PrecisionSetting = Annotated[
    Precision,
    Field(
        description="'fp32'; 'bf16' (16-bit products, twice as fast where the processor has them), 'fp16' (GPU) or "
        "'tf32' (NVIDIA); weights and sums stay fp32"
    ),
]
ChannelsLast = Annotated[
    Layout,
    Field(
        description="images with the channels innermost in memory; 'auto': for models with 2-d convolutions on a CPU "
        "with AVX2 or AVX-512, where that is faster; changes the last bits"
    ),
]


@dataclass(frozen=True)
class Computing:
    """Device, number format and memory layout, from the settings of an engine."""

    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: Layout = False

    def check(self) -> None:
        """Raises `ConfigError` if this machine has no such device, or the device does not support the precision."""
        kind, _, number = self.device.partition(":")
        if kind == "cuda":
            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if not gpus:
                why = hardware().obstacle()
                driver_check = ", or check that nvidia-smi lists a GPU and torch is a CUDA build"
                raise ConfigError(
                    f"the device is '{self.device}', but torch {torch.__version__} finds no GPU",
                    where="engine.device",
                    hint=f"set engine.device=cpu{f'; {why}' if why else driver_check}",
                )
            if number and int(number) >= gpus:
                raise ConfigError(
                    f"unknown device '{self.device}'",
                    where="engine.device",
                    hint=f"choose from: {', '.join(f'cuda:{k}' for k in range(gpus))}",
                )
        if self.precision == "tf32" and kind != "cuda":
            raise ConfigError(
                f"'tf32' is a format of NVIDIA GPUs, but the device is '{self.device}'",
                where="engine.precision",
                hint="take bf16 or fp32",
            )
        if self.precision == "fp16" and kind == "cpu":
            raise ConfigError(
                "fp16 convolutions are not optimized on CPUs: a step takes about a hundred times as long as in fp32",
                where="engine.precision",
                hint="take bf16, or fp32",
            )

    def applied(self, program: Program) -> Program:
        """The program with this device and arithmetic."""
        return replace(program, device=self.device, arithmetic=Arithmetic(self.precision, self.channels_last))


ON_CPU = Computing()


def resolved(device: str, spread: bool = False) -> str:
    """The device; for 'auto' the GPUs of this machine, or 'cpu' if torch cannot use one.

    Args:
        device: the setting: 'auto', 'cpu', 'cuda', or 'cuda:1' and so on.
        spread: whether workers use all GPUs, 'cuda'. Otherwise the GPU with the most free memory is used, such as
            'cuda:1'.

    Raises `RunFailed` if the free memory of several GPUs cannot be read.

    >>> resolved("cuda:1")
    'cuda:1'
    """
    if device != "auto":
        return device
    gpus = len(hardware().gpus)
    if gpus == 0:
        return "cpu"
    return "cuda" if gpus == 1 or spread else freest()


def freest() -> str:
    """The GPU with the most free memory, such as 'cuda:1'. Raises `RunFailed` if it cannot be read."""
    free = free_memory_of("cuda")
    return f"cuda:{free.index(max(free))}"


def default_workers(computing: Computing, threads: int) -> int:
    """One worker per core, or two per GPU."""
    cores = max(1, usable_cores() // threads)
    if not computing.device.startswith("cuda"):
        return cores
    gpus = torch.cuda.device_count() if computing.device == "cuda" else 1
    return max(1, min(cores, _PER_GPU * gpus))


def devices_of(device: str, workers: int) -> list[str]:
    """The device of each worker: `device`, or for 'cuda' the GPUs, distributed by their free memory.

    Raises `RunFailed` if their free memory cannot be read.
    """
    if device != "cuda":
        return [device] * workers
    free = free_memory_of(device) if torch.cuda.device_count() > 1 else [1]
    return [f"cuda:{k}" for k in placed(free, workers)]


def share_of_gpu(device: str, workers: int) -> int:
    """The free bytes of a GPU for each of its workers; the smallest such share of all GPUs.

    Raises `RunFailed` if its free memory cannot be read.
    """
    free = free_memory_of(device)
    gpus = placed(free, workers)
    return min(free[k] // gpus.count(k) for k in gpus)


def placed(free: Sequence[int], workers: int) -> list[int]:
    """The GPU of each worker: each goes to the GPU that then has the most free memory per worker.

    Args:
        free: bytes, of each GPU.

    >>> placed([80, 80, 30], 5)
    [0, 1, 0, 1, 2]
    """
    gpus: list[int] = []
    for _ in range(workers):
        gpus.append(next_gpu(free, gpus))
    return gpus


def next_gpu(free: Sequence[int], taken: Sequence[int | None]) -> int:
    """The GPU of the next worker: the one that then has the most free memory per worker.

    Args:
        free: bytes, of each GPU.
        taken: the GPUs of the other workers; None for a worker without one.

    >>> next_gpu([80, 80, 30], [0, 1, 0, None])
    1
    """
    return max(range(len(free)), key=lambda k: (free[k] / (taken.count(k) + 1), -k))


def show_only(device: str) -> None:
    """Hides all GPUs except this one, such as 'cuda:1', from this process, which then sees it as 'cuda'.

    Call it before the process uses CUDA. Does nothing for a device without a number.
    """
    index = torch.device(device).index
    if index is not None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[index] if shown else str(index)


def free_memory_of(device: str) -> list[int]:
    """The free bytes of a GPU, or of each for 'cuda'. Raises `RunFailed` if they cannot be read.

    A separate process reads them, because reading opens a CUDA context of half a gigabyte on each GPU.
    """
    done = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise RunFailed(f"cannot read the free memory of the GPUs: {last}", hint="check nvidia-smi")
    free: list[int] = json.loads(done.stdout)
    index = torch.device(device).index
    return free if index is None else free[index : index + 1]
