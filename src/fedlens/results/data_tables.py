"""Tables of the datasets, of the costs of models, and of pre-trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.base.format import MISSING, count, duration, label, metric_value, millions, number, size
from fedlens.results.data_json import CasePopulation, CellCost, read_costs, read_populations
from fedlens.results.rows import Results, Row
from fedlens.results.stated import StatedValue, stated_label, stated_values
from fedlens.results.statistics import mean
from fedlens.results.study_table import StudyTable, TableCell, TableView

FactColumn = tuple[str, str, Callable[[float | None], str]]  # key, head, and how a value is written
STATED = "paper"


def datasets(view: TableView) -> StudyTable:
    """Clients, classes and examples of each case, and how much clients differ (hsu2020, table 1).

    The last column is the weighted mean of the clients' distances from the population (hsu2020, section 6.1).

    Raises `DataError` if the populations were not made yet.
    """
    populations = [p for p in read_populations(_data(view, "populations")) if p.case in view.info.cases]
    columns: list[FactColumn] = [
        ("clients", "clients", count),
        ("classes", "classes", count),
        ("examples", "examples", count),
        ("smallest", "smallest client", count),
        ("largest", "largest client", count),
        ("classes_per_client", "classes of a client, median", number),
        ("emd", "mean EMD", number),
    ]
    named = any(p.method for p in populations)
    head = [*view.dimension_head, *(["method"] if named else []), "dataset"]
    lines = [
        FactsRow(
            [
                *view.dimension_cells(population.case),
                *map(TableCell, [population.method] if named else []),
                TableCell(population.dataset),
            ],
            population_facts(population),
            _stated(view, None, population.case),
        )
        for population in populations
    ]
    caption = f"Training data of each case at seed {view.info.seeds[0]}."
    return _table(view, "Training data", caption, head, lines, columns)


def population_facts(population: CasePopulation) -> dict[str, float]:
    """The numbers of one population, by the name that files of stated numbers use.

    >>> columns, counts, offsets = [0, 1, 0], [1, 1, 1], [0, 2, 3]
    >>> population = CasePopulation(
    ...     "", {}, "", 0, "d", {}, ["a", "b"], [2, 1], ["x", "y"], columns, counts, offsets)
    >>> facts = population_facts(population)
    >>> facts["clients"], facts["examples"], facts["largest"], round(facts["emd"], 3)
    (2, 3, 2, 0.444)
    """
    census = population.census
    per_client = census.classes_per_client()
    return {
        "clients": len(population.ids),
        "classes": len(population.classes),
        "examples": int(census.sizes.sum()),
        "smallest": int(census.sizes.min()) if len(census) else 0,
        "largest": int(census.sizes.max(initial=0)),
        "imbalance": float(census.sizes.max()) * len(census) / total
        if (total := census.sizes.sum())
        else math.nan,
        "classes_per_client": float(np.median(per_client)) if len(per_client) else math.nan,
        "emd": round(census.emd(), 4),
    }


def efficiency(
    view: TableView,
    *,
    runs: Annotated[bool, Field(description="columns of time and bytes, which need runs")] = True,
    memory: Annotated[bool, Field(description="a column of the memory of a training step")] = False,
    shape: Annotated[
        list[int] | None, Field(description="images [C, H, W] that the models are counted for, without data")
    ] = None,
    classes: Annotated[int | None, Field(description="the number of classes, with shape")] = None,
    gbit: Annotated[
        float | None, Field(gt=0, description="bandwidth, for a column of the time of communication")
    ] = None,
) -> StudyTable:
    """What each method costs: parameters, multiply-adds, memory, rounds, time and bytes (fedcv, tables 3, 6, 7, 8).

    Time and bytes are means over seeds. The time of communication is bytes / bandwidth, as in the caption of fedcv's
    table 3: without stragglers and latency.

    Raises `DataError` if the models were not counted yet.
    """
    costs = {(c.method, _key(c.case)): c for c in read_costs(_data(view, "costs"))}
    columns = _columns(list(costs.values()), runs, memory, gbit)
    many = len(view.info.cases) > 1
    lines = []
    for method in view.info.methods:
        for case in view.info.cases:
            cell = view.cell(method, case)
            finished = [row for row in cell.runs.values() if row.status == "finished"] if cell else []
            names = [TableCell(view.label(method)), *(view.dimension_cells(case) if many else [])]
            facts = cost_facts(costs.get((method, _key(case))), finished, gbit)
            label = stated_label(view.info.document, method, "")
            lines.append(FactsRow(names, facts, _stated(view, method, case), label))
    shapes = sorted({"×".join(map(str, cost.input_shape)) for cost in costs.values()})
    caption, notes = f"Costs of the models, counted for images of {' and '.join(shapes)} pixels.", []
    if memory:
        devices = sorted({cost.device for cost in costs.values() if cost.device})
        batches = sorted({cost.batch for cost in costs.values() if cost.batch})
        step = f"Memory is that of a training step on {' and '.join(devices) or 'this machine'}"
        notes.append(f"{step}, batches of {', '.join(map(str, batches))}.")
    if runs:
        notes.append("Time and bytes are means over seeds; bytes are those of all clients, down and up.")
    notes += [
        f"{view.label(cost.method)}: memory was not measured: {cost.reason}."
        for cost in costs.values()
        if memory and cost.reason and cost.method in view.info.methods
    ]
    head = ["method", *(view.dimension_head if many else [])]
    return _table(view, "Costs", caption, head, lines, columns, notes)


@dataclass(frozen=True)
class FactsRow:
    """A row of numbers by name, and those that the paper states; `label` is the paper's, if it is another."""

    names: Sequence[TableCell]
    facts: Mapping[str, float]
    stated: Mapping[str, StatedValue]
    label: str = ""


def _table(
    view: TableView,
    title: str,
    caption: str,
    head: Sequence[str],
    lines: Sequence[FactsRow],
    columns: Sequence[FactColumn],
    notes: Sequence[str] = (),
) -> StudyTable:
    """A table with a row for each of `lines`, and below it one in italics with the paper's numbers."""
    rows, sources = [], list[str]()
    for line in lines:
        rows.append([*line.names, *(TableCell(shown(line.facts.get(key))) for key, _, shown in columns)])
        if any(key in line.stated for key, _, _ in columns):
            first = f"{STATED}: {line.label}" if line.label else STATED
            texts = [
                line.stated[key].word + shown(line.stated[key].number) if key in line.stated else MISSING
                for key, _, shown in columns
            ]
            rows.append(
                [TableCell(text, italic=bool(text)) for text in [first, *[""] * (len(head) - 1), *texts]]
            )
            sources = ["Rows in italics are the paper's numbers."]
    heads = [*head, *(title for _, title, _ in columns)]
    return StudyTable(view.name, view.title or title, caption, heads, rows, [*notes, *sources], len(head))


def _columns(costs: Sequence[CellCost], runs: bool, memory: bool, gbit: float | None) -> list[FactColumn]:
    columns: list[FactColumn] = [("parameters", "parameters", count)]
    if any(cost.trainable != cost.parameters for cost in costs):
        columns.append(("trainable", "trained", count))
    if any(cost.backbone is not None for cost in costs):
        columns.append(("backbone", "without classifier", count))
    columns.append(("multiply_adds", "multiply-adds", millions))
    if memory:
        columns += [("batch", "batch", count), ("memory", "memory", size), ("estimated", "estimated", size)]
    if runs:
        columns += [
            ("rounds", "rounds", count),
            ("seconds_a_round", "time a round", duration),
            ("seconds", "total time", duration),
            ("bytes", "sent", size),
        ]
    if gbit is not None:
        columns.append(("communication_seconds", f"sending at {gbit:g} Gbit/s", duration))
    return columns


def cost_facts(cost: CellCost | None, lines: Sequence[Row], gbit: float | None = None) -> dict[str, float]:
    """The numbers of one row, by the name that files of stated numbers use, without unknown ones.

    Args:
        cost: of the model; without it, parameters and multiply-adds are those that the runs recorded.
        lines: the finished runs of the cell.
        gbit: the bandwidth, in 10^9 bits a second.
    """
    facts = {key: mean([line.facts.get(key) for line in lines]) for key in ("parameters", "multiply_adds")}
    if cost is not None:
        counted = ("parameters", "trainable", "backbone", "multiply_adds", "batch", "memory", "estimated")
        facts |= {key: asdict(cost)[key] for key in counted}
    facts["rounds"] = mean([line.rounds for line in lines])
    facts["seconds"] = mean([line.facts.get("seconds") for line in lines])
    facts["bytes"] = mean([line.last("bytes") for line in lines])
    available = {key: value for key, value in facts.items() if value is not None}
    if available.get("rounds") and "seconds" in available:
        available["seconds_a_round"] = available["seconds"] / available["rounds"]
    if gbit is not None and "bytes" in available:
        available["communication_seconds"] = available["bytes"] * 8 / (gbit * 1e9)
    return available


def _data(view: TableView, what: str) -> Any:
    if what not in view.results.data:
        raise DataError(
            f"data.json has no {what}, which this table shows",
            where=view.where,
            hint=f"run the study again: {view.results.info.command}",
        )
    return view.results.data[what]


def _key(case: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in case.items()))


def _stated(view: TableView, method: str | None, case: Mapping[str, Any]) -> dict[str, StatedValue]:
    """The paper's values of a row by metric."""
    values = stated_values(view.info.document) if view.document else []
    return {
        value.metric: value
        for value in values
        if (method is None or value.method == method) and value.holds_for(case) and not value.at
    }


def pretraining_tables(results: Results) -> list[StudyTable]:
    """One table with a row for each pre-training that runs start from; none for a study without."""
    pretrained = [results.lines.get(entry.digest, entry).at(entry) for entry in results.info.pretrained]
    if not pretrained:
        return []
    caption = "What runs start from; their images and times are in no other number of this page."
    head = ("pre-training", "status", "rounds", "images", "CPU time", "last value")
    notes = [
        "An image of which two views are trained on counts once.",
        "A pre-training is done once for all seeds and kept in the user's cache.",
        *(f"{row.method}: {row.reason}" for row in pretrained if row.reason),
    ]
    rows = []
    for row in pretrained:
        texts, value = ["not done", *[MISSING] * 4], row.final(row.main)
        if row.status is not None:
            images = count((row.curve.get("examples") or [None])[-1])
            last = MISSING if value is None else f"{metric_value(row.main, value)} {label(row.main)}"
            texts = [row.status, count(row.rounds), images, duration(row.facts.get("cpu_seconds")), last]
        name = results.info.pretrained_labels.get(row.method, row.method)
        rows.append([*map(TableCell, (name, *texts))])
    return [StudyTable("pretraining", "Pre-training", caption, head, rows, notes)]
