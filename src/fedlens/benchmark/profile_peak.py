"""How fast the chip could be: its data sheet where we know it, a large matrix product where we do not."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

# Dense TFLOP/s by the makers' data sheets, by what `torch.cuda.get_device_name` has in it; the first that fits.
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
_TURNS = 3
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """FLOP/s, and in words where the figure is from."""

    flops: float
    source: str


def peak_of(device: str, precision: str, cores: int) -> Peak:
    """The peak of this device in this precision; on a CPU, of so many cores.

    >>> peak_of("cpu", "fp32", 1).source
    'measured: a product of 2048 x 2048 matrices in fp32 on 1 core'
    """
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = next((sheet for label, sheet in _SHEETS if label in name), {})
        if precision in known:
            return Peak(known[precision] * 1e12, f"data sheet of {name}, {precision}, dense")
        side, where = _SIDE_GPU, name
    else:
        side, where = _SIDE, f"{cores} core{'s' * (cores != 1)}"
    return Peak(
        _product(device, precision, side, cores),
        f"measured: a product of {side} x {side} matrices in {precision} on {where}",
    )


def _product(device: str, precision: str, side: int, cores: int) -> float:
    """FLOP/s of the best of a few products."""
    matmul: Any = torch.backends.cuda.matmul
    threads, before = torch.get_num_threads(), matmul.fp32_precision
    with ExitStack() as undo:
        undo.callback(torch.set_num_threads, threads)
        undo.callback(setattr, matmul, "fp32_precision", before)
        torch.set_num_threads(cores)
        if torch.device(device).type == "cuda":
            matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        a = torch.ones(side, side, dtype=_TYPES.get(precision, torch.float32), device=device)
        best = float("inf")
        for _ in range(_TURNS):
            _settle(device)
            began = time.perf_counter()
            torch.mm(a, a)
            _settle(device)
            best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best


def _settle(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
