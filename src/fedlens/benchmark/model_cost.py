"""The cost of the model of a run, counted and measured without its data and without training."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedlens.benchmark.batch_memory import info_of, measured_memory
from fedlens.benchmark.memory_step import TrainingTrial, trial
from fedlens.models.counts import multiply_adds
from fedlens.models.head import head_of
from fedlens.settings.config import plain, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan


@dataclass(frozen=True)
class MeasuredModel:
    """The counts of a model, and the memory of a training step; see `fedlens.results.model_costs.CellCost`."""

    model: str
    input_shape: Sequence[int]
    classes: int
    parameters: int
    trainable: int
    backbone: int | None
    multiply_adds: int | None
    batch: int | None
    memory: int | None = None
    estimated: int | None = None
    device: str = ""
    reason: str | None = None


def model_cost(
    settings: Mapping[str, Any],
    *,
    memory: bool = False,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    data_dir: Path | None = None,
    download: bool = False,
) -> MeasuredModel:
    """Counts the model of a run with these settings, and measures the memory of its training step.

    Args:
        settings: those of an experiment, as nested tables.
        memory: measure the memory, in a process of its own.
        shape, classes: (C, H, W) of an image and the number of classes, in place of the run's data, which need not
            exist then.

    Raises `ConfigError` if a setting is wrong, `DataError` if the data are missing.

    >>> settings = {"rounds": 1, "model": "linear", "local": {"lr": 0.1},
    ...             "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}
    >>> cost = model_cost(settings, shape=(1, 8, 8), classes=10)
    >>> cost.parameters, cost.trainable, cost.backbone, cost.multiply_adds
    (650, 650, 0, 640)
    """
    source = Source(dict(settings))
    planned = plan(read_config(source.values, source.locate), source)
    info = info_of(planned, shape, classes, data_dir, download)
    batch = planned.config.local.batch_size
    of_step = trial(planned, info, 1 if batch == "all" else int(batch))
    counts = _counts(of_step)
    step: dict[str, Any] = {}
    if memory and batch != "all":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run.toml"
            file.write_text(tomli_w.dumps(plain(planned.config)), encoding="utf-8")
            result = measured_memory(str(file), (), info, int(batch))
        step = {"memory": result.measured, "estimated": result.estimated, "reason": result.reason}
        step["device"] = of_step.program.device
    return MeasuredModel(
        model=str(planned.config.model["name"]),
        input_shape=list(of_step.model.input_shape),
        classes=len(info.classes),
        batch=None if batch == "all" else int(batch),
        **counts,
        **step,
    )


def _counts(of_step: TrainingTrial) -> dict[str, Any]:
    """Parameters and multiply-adds, without memory for the weights."""
    model = of_step.model
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = model.build(initial=False)
        sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
        head = head_of(module, model.classes) if of_step.task.kind == "classification" else None
        products = None
        with suppress(Exception):  # a model that looks at values is not counted
            products = multiply_adds(module, of_step.task.blank(1, model.input_shape))
    total = sum(n for n, _ in sizes)
    without = None if head is None else total - sum(p.numel() for p in head.linear.parameters())
    return {
        "parameters": total,
        "trainable": sum(n for n, trained in sizes if trained),
        "backbone": without,
        "multiply_adds": products,
    }
