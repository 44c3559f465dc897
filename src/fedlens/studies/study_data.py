"""Computes the content of a study that needs no training: the clients' data, and the costs of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedlens.results.model_costs import CellCost, cost_values, read_costs
from fedlens.results.populations import (
    CasePopulation,
    needs_populations,
    population_values,
    read_populations,
)
from fedlens.results.rows import read_data, write_data
from fedlens.settings.datadir import data_directory
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
    from fedlens.settings.run_partition import run_partition

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
                whole = run_partition(run.settings, root=data_directory(data_dir), download=download)
                made[digest] = CasePopulation.of(
                    whole.partition, case.values, settings=digest, seed=run.seed, test=whole.test_counts
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
    for case in cells.cases:
        for method in cells.methods:
            run = _first_run(cells, method, case)
            parts = {key: run.settings.get(key) for key in ("model", "task", "local", "engine")}
            dataset = run.settings["data"].get("dataset"), run.settings["data"].get("augment")
            digest = _digest("cost", parts, dataset, shape, classes, memory)
            if digest not in made:
                say(f"model of {run.key}")
                made[digest] = _cost(run, digest, shape, classes, memory, data_dir, download)
            costs.append(replace(made[digest], method=method.name, case=dict(case.values)))
    return costs


def _cost(
    run: PlannedRun,
    digest: str,
    shape: Sequence[int] | None,
    classes: int | None,
    memory: bool,
    data_dir: Path | None,
    download: bool,
) -> CellCost:
    from fedlens.benchmark.model_cost import model_cost

    measured = model_cost(
        run.settings, memory=memory, shape=shape, classes=classes, data_dir=data_dir, download=download
    )
    return CellCost(settings=digest, method=run.method, case=dict(run.case), **asdict(measured))
