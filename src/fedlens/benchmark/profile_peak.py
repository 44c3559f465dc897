"""The peak FLOP/s of a device: from its data sheet where that is known, else measured with a large matrix product."""

from __future__ import annotations

import timeit
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from fedlens.core.arithmetic import Arithmetic, Precision

# Dense TFLOP/s from the makers' data sheets; the first label that `torch.cuda.get_device_name` contains applies.
_SHEETS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H100 PCIe", {"fp32": 51.2, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5}),
    ("H100 NVL", {"fp32": 60.0, "tf32": 417.5, "bf16": 835.0, "fp16": 835.0}),
    ("H100", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("H200", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("A100", {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}),
    ("V100", {"fp32": 15.7, "fp16": 125.0}),
    ("T4", {"fp32": 8.1, "fp16": 65.0}),
)
_SIDE, _SIDE_GPU = 2048, 8192
_TIMES = 3
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """FLOP/s, and a phrase that says where the figure is from."""

    flops: float
    source: str


def peak_of(device: str, precision: Precision, cores: int) -> Peak:
    """The peak of this device in this precision; on a CPU, of so many cores.

    >>> peak_of("cpu", "fp32", 1).source
    'measured: a product of 2048 x 2048 matrices in fp32 on 1 core'
    """
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        sheet = next((sheet for label, sheet in _SHEETS if label in name), {})
        if precision in sheet:
            return Peak(sheet[precision] * 1e12, f"data sheet of {name}, {precision}, dense")
        side, where = _SIDE_GPU, name
    else:
        side, where = _SIDE, f"{cores} core{'s' * (cores != 1)}"
    return Peak(
        _measured(device, precision, side, cores),
        f"measured: a product of {side} x {side} matrices in {precision} on {where}",
    )


def _measured(device: str, precision: Precision, side: int, cores: int) -> float:
    """FLOP/s of the fastest of a few products."""
    on_gpu = torch.device(device).type == "cuda"
    with ExitStack() as restore:
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        restore.enter_context(Arithmetic(precision).on(torch.device(device)))
        torch.set_num_threads(cores)
        a = torch.ones(side, side, dtype=_TYPES.get(precision, torch.float32), device=device)

        def product() -> None:
            torch.mm(a, a)
            if on_gpu:
                torch.cuda.synchronize(device)

        product()  # the first one allocates memory and starts libraries
        return 2 * side**3 / min(timeit.repeat(product, number=1, repeat=_TIMES))
