"""Device, number format and memory layout of an engine, and how many workers share which device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.core.arithmetic import Arithmetic, Layout, Precision
from fedlens.core.errors import ConfigError, RunFailed
from fedlens.core.protocol import Program
from fedlens.core.threads import usable_cores as usable_cores

_PER_GPU = 2  # workers of one GPU: one computes while the other reads batches or sends
_FREE = (
    "import json, torch; "
    "print(json.dumps([torch.cuda.mem_get_info(k)[0] for k in range(torch.cuda.device_count())]))"
)

Device = Annotated[
    str, Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="'cpu', 'cuda', 'cuda:1' and so on")
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
    """Device, number format and layout, as an engine's settings say."""

    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: Layout = False

    def check(self) -> None:
        """Raises `ConfigError` where this machine has no such device, or the device no such numbers."""
        kind, _, number = self.device.partition(":")
        if kind == "cuda":
            found = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if not found:
                raise ConfigError(
                    f"the device '{self.device}' is asked for, and torch {torch.__version__} finds no GPU here",
                    where="engine.device",
                    hint="set engine.device=cpu; or see whether nvidia-smi lists a GPU and torch is a CUDA build",
                )
            if number and int(number) >= found:
                there = ", ".join(f"cuda:{k}" for k in range(found))
                raise ConfigError(
                    f"there is no device '{self.device}'",
                    where="engine.device",
                    hint=f"there are: {there}",
                )
        if self.precision == "tf32" and kind != "cuda":
            raise ConfigError(
                f"'tf32' is a format of NVIDIA's GPUs, and the device is '{self.device}'",
                where="engine.precision",
                hint="take bf16 or fp32",
            )
        if self.precision == "fp16" and kind == "cpu":
            raise ConfigError(
                "convolutions in fp16 have no fast form on a CPU: a step takes a hundred times as long as in fp32",
                where="engine.precision",
                hint="take bf16, or fp32",
            )

    def applied(self, program: Program) -> Program:
        """The program, to be computed so. A program that is fp32 on the CPU stays the one it was."""
        return replace(program, device=self.device, arithmetic=Arithmetic(self.precision, self.channels_last))

    def begin(self) -> Callable[[], None]:
        """Sets what torch keeps for the whole process; the result sets it back.

        Torch takes tf32 for convolutions unless it is told not to, kernels that differ from run to run, and the first
        GPU for whatever names none.
        """
        if not self.device.startswith("cuda"):
            return lambda: None
        backends: Any = torch.backends
        cudnn = backends.cudnn
        before = (
            backends.cuda.matmul.fp32_precision,
            cudnn.conv.fp32_precision,
            cudnn.deterministic,
            cudnn.benchmark,
            torch.cuda.current_device(),
        )

        def put(matmul: str, conv: str, deterministic: bool, benchmark: bool, current: int) -> None:
            backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision = matmul, conv
            cudnn.deterministic, cudnn.benchmark = deterministic, benchmark
            torch.cuda.set_device(current)  # the one that is seeded, and whose memory is looked at

        wanted = "tf32" if self.precision == "tf32" else "ieee"
        index = torch.device(self.device).index
        put(wanted, wanted, True, False, before[-1] if index is None else index)
        return lambda: put(*before)


ON_CPU = Computing()


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
