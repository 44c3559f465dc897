"""Checks before training that a model with its batches fits the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedlens.core.errors import ConfigError
from fedlens.core.free_memory import free_memory
from fedlens.core.random import random_state_kept
from fedlens.engines.devices import Computing, default_workers
from fedlens.local.settings import LocalSettings
from fedlens.local.training_memory import training_memory

_WORKER = 2**28  # bytes of a worker process that has loaded PyTorch
_MANY = ("processes", "ray")  # engines whose workers all train at the same time


def check_memory(
    module: nn.Module,
    input_shape: Sequence[int],
    local: LocalSettings,
    largest: int,
    engine: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Raises `ConfigError` if one client's training does not fit the free memory; says so if all workers' does not.

    Args:
        module: the model, which is moved to the meta device.
        input_shape: of one image.
        local: the settings of local training.
        largest: the examples of the largest client: no batch is larger.
        engine: the engine's table.
    """
    batch = local.batch(local.examples or largest)
    with random_state_kept():
        memory = training_memory(module, input_shape, batch, local)
    if memory is None:
        return
    device = str(engine.get("device", "cpu"))
    needed, free = memory.needed(device), _free(device)
    if needed > free:
        fixed = memory.needed(device) - memory.images
        per_image = max(1, (fixed - memory.model - memory.kept * memory.trained) // batch)
        fits = (free - memory.model - memory.kept * memory.trained) // per_image
        smaller = "choose a smaller model or smaller images"
        raise ConfigError(
            f"training with batches of {batch:,} images takes about {_shown(needed)} of memory, but only "
            f"{_shown(free)} is free",
            where="local.batch_size",
            hint=f"set local.batch_size to {fits:,} or less, or {smaller}" if 0 < fits < batch else smaller,
        )
    if engine.get("name") in _MANY and device == "cpu":
        workers = engine.get("workers") or default_workers(Computing(), engine.get("threads", 1))
        each = needed + _WORKER
        if workers * each > free:
            say(
                f"{workers} workers take about {_shown(workers * each)} of memory, and {_shown(free)} is free: "
                f"set engine.workers to {max(1, free // each)} if the system ends workers"
            )


def _free(device: str) -> int:
    if not device.startswith("cuda"):
        return free_memory()
    free: int = torch.cuda.mem_get_info(torch.device(device))[0]
    return free


def _shown(size: int) -> str:
    """
    >>> _shown(3 * 2**30 // 2), _shown(40 * 2**20)
    ('1.5 GiB', '40 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{max(1, size >> 20)} MiB"
