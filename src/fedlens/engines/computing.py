"""Where and how an engine computes: the device, the number format, the memory layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field

from fedlens.core.arithmetic import Arithmetic, Precision
from fedlens.core.errors import ConfigError
from fedlens.core.protocol import Program

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
    bool,
    Field(description="images with channels innermost: faster for some models; other sums in the last bits"),
]


@dataclass(frozen=True)
class Computing:
    """Device, number format and layout, as an engine's settings say."""

    device: str = "cpu"
    precision: Precision = "fp32"
    channels_last: bool = False

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


def computing_of(engine: Any) -> Computing:
    """How an engine computes; one that does not say computes plainly."""
    found: Computing = getattr(getattr(engine, "chosen", engine), "computing", ON_CPU)
    return found
