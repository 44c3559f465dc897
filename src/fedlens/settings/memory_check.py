"""The memory that training a model takes: computed before it starts, and compared with what is free."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlens.base.errors import ConfigError
from fedlens.base.memory import free_memory
from fedlens.core.protocol import ModelSpec
from fedlens.core.random import random_state_kept
from fedlens.engines.devices import GPU_CONTEXT, Computing, default_workers, free_memory_of
from fedlens.engines.traits import traits_of
from fedlens.local.settings import LocalSettings
from fedlens.tasks.task import Task
from fedlens.vision.detector import Detector

_WORKER = 2**28  # bytes of a worker process that has loaded PyTorch
_TINY = 2**26
_STEP = 2000  # bytes of a step for each byte of weights and images are too many: measured 20 to 350
_HEAP = 1.5
"""Process memory per byte of tensors: the heap of a CPU fragments, and oneDNN copies tensors to other layouts.
Measured for three steps in a process: 1.2 (ResNet-56) to 2.0 (networks of few large filters)."""
_KERNELS = 25 * 2**20
"""Memory of the kernels that a process compiles and loads in its first step on a CPU."""
_CACHE = 1.2
"""GPU memory per byte of tensors: an assumption on the cache of CUDA's allocator, not measured."""


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
    if workers * (_bound(module, model, batch) + beside) <= free:
        return
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
    bound, memory = _bound(module, model, batch), None
    if bound > _TINY:
        memory = training_memory(module, model.input_shape, batch, local, task, model.classes)
    return own + (bound if memory is None else memory.needed(device))


def _bound(module: nn.Module, model: ModelSpec, batch: int) -> int:
    """More bytes than a step of this model takes."""
    tensors = [*module.parameters(), *module.buffers()]
    return _STEP * (sum(tensor.nbytes for tensor in tensors) + batch * prod(model.input_shape) * 4)


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


@dataclass(frozen=True)
class TrainingMemory:
    """The bytes that local training takes in addition to a process that has only loaded PyTorch.

    Attributes:
        step: of tensors at the largest moment of a step: activations, their gradients, the weights' gradients.
        model: of the weights and buffers.
        trained: of the trainable weights.
        kept: copies of the trainable weights: the weights that training started from, and the optimizer's state.
        images: of one batch.
    """

    step: int
    model: int
    trained: int
    kept: int
    images: int

    def needed(self, device: str = "cpu") -> int:
        """The bytes of the process, or of the GPU, including losses of the allocator.

        >>> TrainingMemory(step=100, model=10, trained=10, kept=2, images=5).needed("cuda")
        155
        """
        share = _CACHE if device.startswith("cuda") else _HEAP
        return self.fixed(device) + self.images + round(share * self.step)

    def fixed(self, device: str = "cpu") -> int:
        """The bytes that do not depend on the batch: weights, buffers, copies of the trainable weights, kernels."""
        kernels = 0 if device.startswith("cuda") else _KERNELS
        return self.model + self.kept * self.trained + kernels


def training_memory(
    module: nn.Module,
    input_shape: Sequence[int],
    batch: int,
    settings: LocalSettings,
    task: Task,
    classes: int,
) -> TrainingMemory | None:
    """The memory of a training step of this module with batches of `batch` images.

    Every tensor that a forward and a backward pass allocate is tracked until it is freed, on the meta device, so no
    memory is taken and nothing is computed. The module is moved there: pass one that is not used any more.

    Args:
        module: the model.
        input_shape: of one example.
        batch: the examples of a batch.
        settings: of local training.
        task: calls the module.
        classes: the number of classes.

    The loss of a detector is left out. Returns None if the module cannot run on the meta device, because it reads
    values.

    >>> from fedlens.tasks.classification import Classification
    >>> module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False))
    >>> found = training_memory(module, (3, 2, 2), 4, LocalSettings(lr=0.1), Classification(), 5)
    >>> found.model, found.kept, found.images  # 12 x 5 weights, and 4 x 12 pixels, of 4 bytes
    (240, 1, 192)
    """
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        module = module.to("meta").train()
        with random_state_kept(), torch.device("meta"):
            inputs = task.blank(batch, input_shape, dtype)
        trained = [p for p in module.parameters() if p.requires_grad]
        live = _Live()
        live.leave_out([*module.parameters(), *module.buffers(), inputs])
        with random_state_kept(), _Attention(), live:
            leaves = tree_leaves(_outputs(module, inputs, task, classes))
            outputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            total = torch.stack([t.float().sum() for t in outputs]).sum()
            del outputs, leaves
            torch.autograd.grad(total, trained, allow_unused=True)
    except Exception:  # of any kind: a model may read the values that it computes
        return None
    copies = 1 + (2 if settings.optimizer in ("adam", "adamw") else bool(settings.momentum))
    return TrainingMemory(
        live.most,
        sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
        sum(p.nbytes for p in trained),
        copies,
        inputs.nbytes,
    )


def _outputs(module: nn.Module, inputs: Tensor, task: Task, classes: int) -> Any:
    """The tensors that a step keeps for the backward pass; the outputs of a detector, whose loss reads values."""
    return module.raw(inputs) if isinstance(module, Detector) else task.trial(module, inputs, classes)


@dataclass
class _Live(TorchDispatchMode):
    """Counts the bytes of all live tensors: each memory once, from its first tensor until it is freed."""

    now: int = 0
    most: int = 0
    _known: dict[int, weakref.ref[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._follow(value.untyped_storage())
        return result

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Excludes the memory of these tensors, of which operations may return views."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


class _Attention(TorchFunctionMode):
    """Attention in blocks, as devices compute it: on the meta device, PyTorch would create the n x n matrix."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if function is F.scaled_dot_product_attention and named.get("attn_mask") is None and len(args) == 3:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return flash(*args, named.get("dropout_p", 0.0), named.get("is_causal", False))[0]
        return function(*args, **named)
