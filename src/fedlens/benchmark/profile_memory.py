"""The memory of tensors that training one client takes, as `torch.profiler` records it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from fedlens.base.parse_text import parse_json
from fedlens.core.protocol import Ask, Failure, Id, Payload
from fedlens.core.random import random_state_kept
from fedlens.engines.executor import Executor, Item
from fedlens.run.build import Built


def measure_memory(built: Built, ask: Ask, state: Payload) -> dict[str, Any]:
    """Trains the first client of an ask, with this state, once more in this process.

    Returns `training`, the bytes of tensors that training adds at its largest moment, the model and the images not
    counted; `gpu`, the bytes of all tensors on the GPU at the largest moment, None on a CPU; and `examples` and
    `batch` of the client. Where the client fails, only `not_measured`, the reason.
    """
    with client_again(built, ask, state) as (executor, item):
        on_gpu = executor.device.type == "cuda"
        # The first time builds the model and fills the caches.
        first = executor.answer(ask.op, ask.shared, item, ask.expect)
        if isinstance(first, Failure):
            return {"not_measured": f"the client failed: {first.reason}"}
        del first
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            executor.answer(ask.op, ask.shared, item, ask.expect)
        gpu = torch.cuda.max_memory_allocated() if on_gpu else None
    examples = len(built.client_data.data_of(item.client))
    batch = built.config.local.batch(examples)
    return {"training": _largest(recorded), "gpu": gpu, "examples": examples, "batch": batch}


@contextmanager
def client_again(built: Built, ask: Ask, state: Payload) -> Iterator[tuple[Executor, Item]]:
    """An executor of this process and the first request of an ask, with this state, as the engine computes."""
    request = ask.requests[0]
    executor = Executor(built.engine.applied(built.program))
    with executor.program.computing(), random_state_kept(executor.device):
        yield executor, Item(Id(1, 0, 0), request.client, request.payload, state)


def _largest(recorded: torch.profiler.profile) -> int:
    """The most bytes that were allocated at one moment and had not been before."""
    with tempfile.TemporaryDirectory(prefix="fedlens-profile-") as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = parse_json(file.read_bytes())["traceEvents"]
    changes = [(event["ts"], int(event["args"]["Bytes"])) for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change[0])
    return max(accumulate((size for _, size in changes), initial=0))
