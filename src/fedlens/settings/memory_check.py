"""Checks before training that a model with its batches fits the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.base.memory import free_memory
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import random_state_kept
from fedlens.engines.devices import GPU_CONTEXT, Computing, default_workers, free_memory_of
from fedlens.engines.traits import traits_of
from fedlens.local.settings import LocalSettings
from fedlens.local.training_memory import training_memory
from fedlens.tasks.task import Task

_WORKER = 2**28  # bytes of a worker process that has loaded PyTorch
_TINY = 2**26
_STEP = 2000  # bytes of a step for each byte of weights and images are too many: measured 20 to 350


def check_memory(
    module: nn.Module,
    model: ModelSpec,
    task: Task,
    local: LocalSettings,
    largest: int,
    engine: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Raises `ConfigError` if one client's training does not fit the free memory; says so if all workers' does not.

    A model whose weights and images are tiny beside the free memory is not followed: that takes seconds at the first
    time, for the imports of PyTorch's meta device.

    Args:
        module: the model, which may be moved to the meta device.
        model: what it was built from.
        task: calls the module.
        local: the settings of local training.
        largest: the examples of the largest client: no batch is larger.
        engine: the engine's table.
    """
    batch = local.batch(local.examples or largest)
    device = str(engine.get("device", "cpu"))
    many = traits_of(engine).has_workers
    free, workers = _free(device, many), _workers(engine) if many and device == "cpu" else 1
    beside = _WORKER if workers > 1 else 0
    tensors = [*module.parameters(), *module.buffers()]
    size = sum(tensor.nbytes for tensor in tensors) + batch * prod(model.input_shape) * 4
    if workers * (_STEP * size + beside) <= free:
        return
    with random_state_kept():
        memory = training_memory(module, model.input_shape, batch, local, task, model.classes)
    if memory is None:
        return
    needed = memory.needed(device)
    if needed > free:
        fixed = memory.fixed(device)
        fits = (free - fixed) * batch // (needed - fixed)
        smaller = "choose a smaller model or smaller images"
        raise ConfigError(
            f"training with batches of {batch:,} images takes about {_shown(needed)} of memory, but only "
            f"{_shown(free)} is free",
            where="local.batch_size",
            hint=f"set local.batch_size to {fits:,} or less, or {smaller}" if 0 < fits < batch else smaller,
        )
    each = needed + beside
    if workers * each > free:
        say(
            f"{workers} workers take about {_shown(workers * each)} of memory, and {_shown(free)} is free: "
            f"set engine.workers to {max(1, free // each)} if the system ends workers"
        )


def check_letters(size: int, engine: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if letters of so many bytes do not fit the free memory.

    One copy of them is in this process; with workers, a second one is between the processes, and a third at the worker.
    """
    copies = 3 if traits_of(engine).has_workers else 1
    free = free_memory() if size else 0
    if copies * size > free:
        raise ConfigError(
            f"what clients send in a round takes about {_shown(copies * size)} of memory "
            f"({'three copies' if copies > 1 else 'one copy'} of {_shown(size)}), but only {_shown(free)} is free",
            where="select.clients_per_round",
            hint="choose fewer clients a round, or smaller features"
            + (", or engine.name = 'inline'" if copies > 1 else ""),
        )


def memory_of_training(
    module: nn.Module, model: ModelSpec, task: Task, local: LocalSettings, largest: int, device: str = "cpu"
) -> int:
    """About the bytes that local training takes in a process of its own, the data aside; on a GPU, of the GPU.

    A tiny model is not followed: it counts with its upper bound. The other arguments are those of `check_memory`.
    """
    own = GPU_CONTEXT if device.startswith("cuda") else _WORKER
    batch = local.batch(local.examples or largest)
    tensors = [*module.parameters(), *module.buffers()]
    bound = _STEP * (sum(tensor.nbytes for tensor in tensors) + batch * prod(model.input_shape) * 4)
    if bound <= _TINY:
        return own + bound
    with random_state_kept():
        memory = training_memory(module, model.input_shape, batch, local, task, model.classes)
    return own + (bound if memory is None else memory.needed(device))


def _workers(engine: Mapping[str, Any]) -> int:
    """The number of workers that take this machine's memory at the same time."""
    return engine.get("workers") or default_workers(Computing(), engine.get("threads", 1))


def _free(device: str, by_workers: bool) -> int:
    """The free bytes where a client trains, by workers or in this process, which has a context on its GPU anyway."""
    if not device.startswith("cuda"):
        return free_memory()
    free: int = (
        max(free_memory_of(device)) if by_workers else torch.cuda.mem_get_info(torch.device(device))[0]
    )
    return free


def _shown(size: int) -> str:
    """
    >>> _shown(3 * 2**30 // 2), _shown(40 * 2**20)
    ('1.5 GiB', '40 MiB')
    """
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{max(1, size >> 20)} MiB"
