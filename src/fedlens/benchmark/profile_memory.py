"""The memory of tensors that training one client takes, as `torch.profiler` records it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from fedlens.core.protocol import Ask, Failure, Id, Payload, Program
from fedlens.core.random import random_state_kept
from fedlens.engines.devices import Computing
from fedlens.engines.executor import Executor, Item
from fedlens.experiment.build import Built


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors.

    Attributes:
        training: how much training adds at its largest moment, the model and the images not counted.
        gpu: the largest moment on the GPU, all tensors counted; None on a CPU.
        examples, batch: of the client.
    """

    training: int
    gpu: int | None
    examples: int
    batch: int


def measure_memory(built: Built, ask: Ask, state: Payload) -> Memory | str:
    """Trains the largest client of an ask once more in this process; the reason as text where that fails."""
    request = max(ask.requests, key=lambda request: len(built.holders.holder(request.client)))
    examples = len(built.holders.holder(request.client))
    program = Program({ask.op: built.algorithm.ops[ask.op]}, built.holders, built.config.seeds.training)
    program = built.engine.applied(program)
    executor = Executor(program)
    item = Item(Id(1, 0, 0), request.client, request.payload, state)
    restore = Computing(
        program.device, program.arithmetic.precision, program.arithmetic.channels_last
    ).begin()
    try:
        with random_state_kept(executor.device):
            first = executor.answer(
                ask.op, ask.shared, item, ask.expect
            )  # builds the model, fills the caches
            if isinstance(first, Failure):
                return f"the client failed: {first.reason}"
            del first
            on_gpu = executor.device.type == "cuda"
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                executor.answer(ask.op, ask.shared, item, ask.expect)
            gpu = torch.cuda.max_memory_allocated() if on_gpu else None
    finally:
        restore()
    return Memory(_largest(recorded), gpu, examples, built.config.local.batch(examples))


def _largest(recorded: torch.profiler.profile) -> int:
    """The most bytes that were allocated at one moment and had not been before."""
    with tempfile.TemporaryDirectory(prefix="fedlens-profile-") as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_bytes())["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    now = largest = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        now += change
        largest = max(largest, now)
    return largest
