"""Computes the content of a study that needs no training: the clients' data, and the costs of models."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError
from fedlens.benchmark.batch_memory import info_of, measured_memory
from fedlens.benchmark.memory_step import TrainingTrial, trial
from fedlens.data.catalogue import data_directory
from fedlens.data.dataset import Dataset, marks_of
from fedlens.data.federated import divided
from fedlens.data.loading import loaded
from fedlens.data.partition.partition import Partition
from fedlens.models.counts import multiply_adds
from fedlens.models.head import head_of
from fedlens.results.data_json import (
    CasePopulation,
    CellCost,
    cost_values,
    population_values,
    read_costs,
    read_populations,
)
from fedlens.results.rows import needs_populations, read_data, write_data
from fedlens.run.client_data import partitioner
from fedlens.settings.config import plain
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from fedlens.studies.cells import StudyCells
from fedlens.studies.expansion import Case, Method
from fedlens.studies.planned import PlannedRun
from fedlens.studies.study_plan import StudyPlan

Say = Callable[[str], None]


def make_data(
    plan: StudyPlan,
    folder: Path,
    *,
    data_dir: Path | None = None,
    download: bool = False,
    say: Say = lambda sentence: None,
) -> None:
    """Writes data.json: the populations and the model costs that figures and tables of the study show.

    Results of an earlier call with the same settings are reused. Writes nothing if no figure or table needs it.

    Raises `ConfigError` if a setting is wrong, `DataError` if data are missing or corrupt.
    """
    study, before = plan.source.settings, read_data(folder)
    data: dict[str, Any] = {}
    if needs_populations(study.figures, study.tables):
        populations = _populations(
            plan.cells, read_populations(before.get("populations", ())), data_dir, download, say
        )
        data["populations"] = population_values(populations)
    asked = [table for table in study.tables if table.get("kind") == "efficiency"]
    if asked:
        costs = _costs(plan.cells, asked, read_costs(before.get("costs", ())), data_dir, download, say)
        data["costs"] = cost_values(costs)
    if data and data != before:
        write_data(folder, data)


def _first_run(cells: StudyCells, method: Method, case: Case) -> PlannedRun:
    """The run of the first point and seed of a cell, on the data of the final runs."""
    return cells.run(method, case, cells.points(method)[0], "final", cells.seeds[0])


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _populations(
    cells: StudyCells, before: Sequence[CasePopulation], data_dir: Path | None, download: bool, say: Say
) -> list[CasePopulation]:
    """One population for each case, or for each method if the methods of a case have different data."""

    made = {population.settings: population for population in before}
    populations: list[CasePopulation] = []
    for case in cells.cases:
        different: dict[str, tuple[Method, PlannedRun]] = {}
        for method in cells.methods:
            run = _first_run(cells, method, case)
            different.setdefault(_data_digest(run), (method, run))
        for digest, (method, run) in different.items():
            label = method.label if len(different) > 1 else ""
            if digest not in made:
                say(f"partition of {run.key}")
                root = data_directory(data_dir)
                partition, test = run_partition(run.settings, root=root, download=download)
                made[digest] = CasePopulation.of(
                    partition, case.values, settings=digest, seed=run.seed, test=test
                )
            populations.append(replace(made[digest], case=dict(case.values), method=label))
    return populations


def _data_digest(run: PlannedRun) -> str:
    """A hash of the settings that the population depends on: the data and the seed."""
    data = {k: v for k, v in run.settings.get("data", {}).items() if k not in ("cache", "prefetch")}
    return _digest("data", data, run.settings.get("seed"), run.settings.get("seeds"))


def _costs(
    cells: StudyCells,
    tables: Sequence[Mapping[str, Any]],
    before: Sequence[CellCost],
    data_dir: Path | None,
    download: bool,
    say: Say,
) -> list[CellCost]:
    """One cost a method and case, with the memory of a step if a table shows it."""
    made = {cost.settings: cost for cost in before}
    memory = any(table.get("memory") for table in tables)
    shapes = [(tuple(t["shape"]), t["classes"]) for t in tables if t.get("shape") and t.get("classes")]
    shape, classes = shapes[0] if shapes else (None, None)
    costs = []
    for method, case in cells.pairs:
        run = _first_run(cells, method, case)
        parts = {key: run.settings.get(key) for key in ("model", "task", "local", "engine")}
        dataset = run.settings["data"].get("dataset"), run.settings["data"].get("augment")
        digest = _digest("cost", parts, dataset, shape, classes, memory)
        if digest not in made:
            say(f"model of {run.key}")
            cost = model_cost(
                run.settings,
                memory=memory,
                shape=shape,
                classes=classes,
                data_dir=data_dir,
                download=download,
            )
            made[digest] = replace(cost, settings=digest)
        costs.append(replace(made[digest], method=method.name, case=dict(case.values)))
    return costs


def run_partition(
    settings: Mapping[str, Any], *, root: Path, download: bool = False
) -> tuple[Partition, NDArray[np.int64]]:
    """The partition of the run with these settings, `data.validation` held out, made without a model.

    With its census, and with int64 [classes], how many test examples show each class.

    Args:
        settings: those of an experiment, as nested tables.
        root: the data folder.

    Raises `ConfigError` if a setting is wrong, `DataError` if the data are missing or corrupt.

    >>> partition, test = run_partition(
    ...     {"rounds": 1, "model": "linear", "local": {"lr": 0.1},
    ...      "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}, root=Path())
    >>> partition.sizes().tolist(), int(test.sum())
    ([360, 359, 359, 359], 360)
    """
    planned = plan_of(Source(dict(settings)))
    config = planned.config
    dataset: Dataset = planned.chosen["data.dataset"](root, download, config.seeds.data)
    if dataset.on_error == "skip":
        # What cannot be decoded is left out of a run, and the positions are those of the rest.
        dataset = loaded(dataset, int(config.data.cache * 2**30))
    if "data.partition" not in planned.chosen:
        raise ConfigError(
            "parties hold parts of the same images, and have no classes of their own to count",
            where="data.parties",
            hint="set data.partition in its place",
        )
    held_out = (config.data.validation, config.seeds.data, config.data.validation_from)
    partition, _, _ = divided(dataset, dataset.table(), partitioner(planned), *held_out)
    marks, _ = marks_of(dataset.test)
    return partition, np.bincount(marks, minlength=len(dataset.classes)).astype(np.int64)


def model_cost(
    settings: Mapping[str, Any],
    *,
    memory: bool = False,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    data_dir: Path | None = None,
    download: bool = False,
) -> CellCost:
    """Counts the model of a run with these settings, without training it, and measures the memory of a step.

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
    planned = plan_of(Source(dict(settings)))
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
    return CellCost(
        settings="",
        method="",
        case={},
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
