"""Measures the memory of local training steps in this process, which is started for that alone.

    python -m fedlens.benchmark.memory_step '{"recipe": "digits", ...}'

It prints a JSON object on its last line of standard output: the fields of `StepMemory`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedlens.base.errors import told
from fedlens.base.memory import free_memory
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.protocol import Client, ClientExamples, ModelSpec, Program
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import fixed_leaves, tree_of
from fedlens.data.augmentation.augmented import Augmentation
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.settings.config_source import read_source
from fedlens.settings.memory_check import training_memory
from fedlens.settings.model_kind import prepared_for, with_vocabulary
from fedlens.settings.plan import Plan, plan_of
from fedlens.tasks.task import Task

STEPS = 3  # the optimizer's state exists from the second step on, and the heap has settled
_NO_MEMORY = "can't allocate memory"  # in the RuntimeError of PyTorch's allocator on a CPU
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class StepMemory:
    """The memory of local training with one batch size.

    Attributes:
        measured: bytes that the process takes at its largest moment beyond those before training; on a GPU, all
            bytes of tensors at their largest moment. None where it was not measured.
        reserved: on a GPU, the bytes that PyTorch's allocator holds for them; else None.
        estimated: the bytes of `TrainingMemory.needed`; None where the model looks at its values.
        reason: why it was not measured.
    """

    measured: int | None = None
    reserved: int | None = None
    estimated: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class TrainingTrial:
    """What is trained: a model for a task with the settings of local training, and where it computes."""

    task: Task
    model: ModelSpec
    settings: LocalSettings
    rounds: int
    program: Program
    threads: int

    @property
    def device(self) -> torch.device:
        """The device of the engine."""
        return torch.device(self.program.device)


@dataclass(frozen=True)
class RandomExamples(ClientExamples):
    """Examples drawn at random in place of a client's, each batch anew."""

    task: Task
    model: ModelSpec
    count: int
    device: torch.device

    def __len__(self) -> int:
        return self.count

    def stretch(self, start: int, stop: int, /) -> tuple[Any, Any]:
        """Random inputs and targets of these positions."""
        n, shape = min(stop, self.count) - start, self.model.input_shape
        generator = torch.Generator().manual_seed(start)
        inputs = self.task.random_inputs(n, shape, generator)
        targets = self.task.random_targets(n, self.model.classes, shape, generator)
        return inputs.to(self.device), targets.to(self.device)

    def read_targets(self, start: int = 0, stop: int | None = None) -> Any:
        """The targets of these positions."""
        return self.stretch(start, self.count if stop is None else stop)[1]

    def batches(self, size: int, rng: Rng, drop_last: bool = False) -> Iterator[tuple[Any, Any]]:
        """Batches of `size`, without end."""
        while True:
            yield self.stretch(0, min(size, self.count))


def planned(recipe: str, overrides: Sequence[str]) -> Plan:
    """The checked settings of a recipe or a file. Raises `ConfigError`."""
    source = read_source(recipe, overrides)
    return plan_of(source)


def trial(plan: Plan, info: DatasetInfo, batch: int) -> TrainingTrial:
    """The trial of these settings on data of this kind, at the size that augmented images have.

    Raises `ConfigError` where they do not fit.
    """
    resolved, chosen = plan.task(info), plan.chosen["model"]
    task: Task = resolved()

    def validated() -> Task:
        task.validate(info)
        return task

    resolved.made(validated)
    task, chosen = task.fitted(info), with_vocabulary(chosen, info)
    shape = tuple(info.input_shape)
    for choice in plan.augments:
        step = choice(shape)
        shape = step.output_shape(shape) if isinstance(step, Augmentation) else shape
    model = task.wrap(
        ModelSpec(
            chosen.factory,
            chosen.name,
            chosen.settings,
            shape,
            max(1, len(info.classes)),
            plan.config.seeds.initialization,
            prepared_for(task, chosen.shared),
        )
    )
    changed = {"steps": STEPS, "epochs": None, "batch_size": batch, "examples": None, "stragglers": 0.0}
    settings = plan.config.local.model_copy(update=changed)
    engine = plan.engine()
    try:
        program = engine.applied(Program({}, RandomExamples(task, model, batch, torch.device("cpu")), 0))  # type: ignore[arg-type]
    finally:
        engine.close()
    threads = int(plan.config.engine.get("threads") or 1)
    rounds = max(plan.config.rounds, settings.lr_warmup + 1)
    return TrainingTrial(task, model, settings, rounds, program, threads)


def measure(trial: TrainingTrial) -> StepMemory:
    """Trains for three steps in this process, and returns the memory that they took.

    Weights are drawn, never loaded. An error in training is the reason of the result.
    """
    model, batch, device = trial.model, int(trial.settings.batch_size), trial.device
    module = model.build(initial=False)
    model = replace(model, fixed=fixed_leaves(module))
    memory = training_memory(module, model.input_shape, batch, trial.settings, trial.task, model.classes)
    del module
    estimated = None if memory is None else memory.needed(trial.program.device)
    free = free_memory()
    if estimated is not None and device.type == "cpu" and estimated > free:
        reason = f"it takes about {estimated / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB is free"
        return StepMemory(estimated=estimated, reason=reason)
    try:
        measured, reserved = _trained(trial, model)
    except (MemoryError, torch.OutOfMemoryError):
        return StepMemory(estimated=estimated, reason=f"the {_place(device)} is out of memory")
    except Exception as error:  # a model may refuse a batch of one image, for example
        full = _NO_MEMORY in str(error)
        reason = f"the {_place(device)} is out of memory" if full else told(error)
        return StepMemory(estimated=estimated, reason=reason)
    return StepMemory(measured, reserved, estimated)


def _place(device: torch.device) -> str:
    return "machine" if device.type == "cpu" else "GPU"


def _trained(trial: TrainingTrial, model: ModelSpec) -> tuple[int, int | None]:
    """(the bytes at the largest moment, on a GPU the bytes of the allocator)."""
    device, arithmetic = trial.device, trial.program.arithmetic
    on_gpu = device.type == "cuda"
    torch.set_num_threads(trial.threads)
    data = RandomExamples(trial.task, model, int(trial.settings.batch_size), device)
    client = Client(0, data, {}, Secrets((0,)), {}, device, arithmetic)
    train = Train(model, trial.task, trial.settings, ClientRule())
    with trial.program.computing():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            before = 0
        else:
            with suppress(AttributeError, OSError):
                ctypes.CDLL(None).malloc_trim(0)  # of glibc
            _CLEAR.write_text("5")  # VmHWM begins anew
            before = _resident("VmRSS")
        tree = {name: leaf.to(device) for name, leaf in tree_of(model.build(initial=False)).items()}
        shared = {"model": model.sent(tree), **trial.settings.shared_rate(1, trial.rounds)}
        train(shared, client, Rng((0, "memory")))
        if on_gpu:
            return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return _resident("VmHWM") - before, None


def _resident(key: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main(words: Mapping[str, Any]) -> StepMemory:
    """The measurement that `words` ask for: recipe, overrides, info and batch."""
    fields: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in words["info"].items()
    }
    info = DatasetInfo(**fields)
    return measure(trial(planned(words["recipe"], words["overrides"]), info, words["batch"]))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(main(json.loads(sys.argv[1])))) + "\n")
