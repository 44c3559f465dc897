"""Measures the memory of local training by batch size, each in a process of its own (fedcv, table 6)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from fedlens.base.errors import ConfigError, DataError
from fedlens.benchmark.memory_step import STEPS, StepMemory, planned, trial
from fedlens.core.dataset_info import DatasetInfo, Kind
from fedlens.data.catalogue import CATALOGUE, data_directory
from fedlens.engines.devices import Computing
from fedlens.run.environment import describe_environment
from fedlens.settings.plan import Plan


def batch_memory(
    recipe: str,
    batches: Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    *,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    data_dir: Path | None = None,
    download: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures the memory of local training of a recipe or a TOML file, once for each batch size.

    Each measurement is three steps in a fresh process, on random examples of the size of augmented images of the
    recipe's data. Weights are drawn, and augmentation is left out, as is what an algorithm keeps at its clients.

    Returns plain values, in bytes: `experiment`, `rows` with the fields of `StepMemory` and `batch`, and `environment`.

    Args:
        batches: the batch sizes; by default that of the recipe.
        overrides: `key=value`, on top of the recipe's settings.
        shape, classes: (C, H, W) of an image, and the number of classes, in place of the recipe's data, which need
            not exist then.
        data_dir, download: as for a run.
        say: called with a sentence before each measurement.
        command: the command line, for the record.

    Raises `FedlensError` as a run of it would.
    """
    plan = planned(recipe, overrides)
    batches = _recipes_own(plan) if batches is None else batches
    info = info_of(plan, shape, classes, data_dir, download)
    first = trial(plan, info, batches[0])
    Computing(first.program.device, first.program.arithmetic.precision).check()
    spec = plan.chosen["model"].made(lambda: first.model.build(initial=False))
    trained, weights = _counts(spec)
    rows = []
    for batch in batches:
        say(f"measuring batches of {batch:,}")
        rows.append({"batch": batch, **asdict(measured_memory(recipe, overrides, info, batch))})
    config, program = plan.config, first.program
    environment = describe_environment(command, config.seed)
    return {
        "experiment": {
            "name": config.name,
            "model": config.model["name"],
            "dataset": config.data.dataset["name"],
            "kind": info.kind,
            "input_shape": list(first.model.input_shape),
            "classes": len(info.classes),
            "parameters": weights,
            "trainable": trained,
            "optimizer": config.local.optimizer,
            "device": program.device,
            "precision": program.arithmetic.precision,
            "steps": STEPS,
        },
        "rows": rows,
        "environment": environment,
    }


def _recipes_own(plan: Plan) -> Sequence[int]:
    """The batch size of the recipe. Raises `ConfigError` if it depends on the client."""
    size = plan.config.local.batch_size
    if size == "all":
        raise ConfigError(
            "the recipe trains on all examples of a client at once, which is no fixed batch size",
            where="--batch",
            hint="name the batch sizes, such as --batch 32,64",
        )
    return [size]


def _counts(module: Any) -> tuple[int, int]:
    """(trainable parameters, all of them)."""
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def info_of(
    plan: Plan, shape: Sequence[int] | None, classes: int | None, data_dir: Path | None, download: bool
) -> DatasetInfo:
    """The facts about the recipe's data, read from the data unless shape and classes are given."""
    dataset = plan.chosen["data.dataset"]
    if shape is None or classes is None:
        try:
            read = dataset(data_directory(data_dir), download, plan.config.seeds.data)
        except DataError as error:
            hint = f"{error.hint}; or measure without data: --shape C,H,W --classes N"
            raise DataError(error.what, where=error.where, hint=hint) from error
        info: DatasetInfo = read.info
        return info
    facts = CATALOGUE.get(dataset.name)
    known = facts.task if facts is not None else "classification"
    named = plan.config.task.get("name")  # a kind, or a task on images of several kinds
    kind: Any = (named if named in get_args(Kind) else None) or dataset.settings.get("task") or known
    return DatasetInfo(dataset.name, kind, tuple(map(str, range(classes))), tuple(shape))


def measured_memory(recipe: str, overrides: Sequence[str], info: DatasetInfo, batch: int) -> StepMemory:
    """The measurement of a fresh process."""
    words = {"recipe": recipe, "overrides": list(overrides), "info": asdict(info), "batch": batch}
    command = [sys.executable, "-m", "fedlens.benchmark.memory_step", json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return StepMemory(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode == -signal.SIGKILL:
        return StepMemory(reason="the system ended the process, as it does when memory runs out")
    lines = done.stderr.strip().splitlines()
    return StepMemory(reason=f"the process ended with code {done.returncode}: {lines[-1] if lines else ''}")


def parsed_batches(text: str) -> list[int]:
    """The batch sizes in a text such as "4,6,8". Raises `ConfigError`.

    >>> parsed_batches("4,6,8")
    [4, 6, 8]
    """
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError(
            f"'{text}' is not a list of batch sizes",
            where="--batch",
            hint="give numbers from 1 on with commas between them, such as 4,6,8",
        )
    return sizes
