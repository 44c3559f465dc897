"""Tables of the datasets, of the costs of models, and of pre-trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedlens.base.errors import DataError
from fedlens.base.format import MISSING, count, duration, label, metric_value, millions, number, size
from fedlens.results.model_costs import CellCost, read_costs
from fedlens.results.populations import CasePopulation, read_populations
from fedlens.results.rows import Results, Row
from fedlens.results.stated import StatedValue, stated_label, stated_values
from fedlens.results.table_format import StudyTable, TableCell
from fedlens.results.table_view import TableView

Shown = Callable[[float | None], str]


def datasets(view: TableView) -> StudyTable:
    """Clients, classes and examples of each case, and how much clients differ (hsu2020, table 1).

    The last column is the weighted mean of the clients' distances from the population (hsu2020, section 6.1).

    Raises `DataError` if the populations were not made yet.
    """
    populations = [p for p in read_populations(_data(view, "populations")) if p.case in view.info.cases]
    columns: list[tuple[str, str, Shown]] = [
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
    rows = []
    for population in populations:
        names = [
            *view.dimension_cells(population.case),
            *([TableCell(population.method)] if named else []),
            TableCell(population.dataset),
        ]
        facts = population_facts(population)
        rows.append([*names, *(TableCell(shown(facts[key])) for key, _, shown in columns)])
        stated = _stated(view, None, population.case)
        if any(key in stated for key, _, _ in columns):
            rows.append(_document_row(len(names), columns, stated))
    sizes = "equal sizes have the same smallest and largest client"
    return StudyTable(
        view.name,
        view.title or "Training data",
        f"Training data of each case at seed {view.info.seeds[0]}; {sizes}.",
        [*head, *(title for _, title, _ in columns)],
        rows,
        _sources(rows),
        len(head),
    )


def population_facts(population: CasePopulation) -> dict[str, float]:
    """The numbers of one population, by the name that document files use.

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
    rows = []
    for method in view.info.methods:
        for case in view.info.cases:
            cost = costs.get((method, _key(case)))
            lines = list(view.results.runs(method, case).values())
            facts = cost_facts(cost, [line for line in lines if line.status == "finished"], gbit)
            names = [TableCell(view.label(method)), *(view.dimension_cells(case) if many else [])]
            rows.append([*names, *(TableCell(shown(facts.get(key))) for key, _, shown in columns)])
            stated = _stated(view, method, case)
            if any(key in stated for key, _, _ in columns):
                label = stated_label(view.info.document, method, "")
                rows.append(_document_row(len(names), columns, stated, label))
    shapes = sorted({"×".join(map(str, cost.input_shape)) for cost in costs.values()})
    caption = f"Costs of the models, counted for images of {' and '.join(shapes)} pixels."
    if memory:
        devices = sorted({cost.device for cost in costs.values() if cost.device})
        batches = sorted({cost.batch for cost in costs.values() if cost.batch})
        caption += f" Memory is that of a training step on {' and '.join(devices) or 'this machine'}"
        caption += f", batches of {', '.join(map(str, batches))}."
    if runs:
        caption += " Time and bytes are means over seeds; bytes are those of all clients, down and up."
    notes = [
        f"{view.label(cost.method)}: memory was not measured: {cost.reason}."
        for cost in costs.values()
        if memory and cost.reason and cost.method in view.info.methods
    ]
    head = ["method", *(view.dimension_head if many else []), *(title for _, title, _ in columns)]
    return StudyTable(
        view.name, view.title or "Costs", caption, head, rows, [*notes, *_sources(rows)], 1 + many
    )


def _columns(
    costs: Sequence[CellCost], runs: bool, memory: bool, gbit: float | None
) -> list[tuple[str, str, Shown]]:
    columns: list[tuple[str, str, Shown]] = [("parameters", "parameters", count)]
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
    """The numbers of one row, by the name that document files use, without unknown ones.

    Args:
        cost: of the model; without it, parameters and multiply-adds are those that the runs recorded.
        lines: the finished runs of the cell.
        gbit: the bandwidth, in 10^9 bits a second.
    """
    facts = {key: _mean([line.facts.get(key) for line in lines]) for key in ("parameters", "multiply_adds")}
    if cost is not None:
        counted = ("parameters", "trainable", "backbone", "multiply_adds", "batch", "memory", "estimated")
        facts |= {key: asdict(cost)[key] for key in counted}
    facts["rounds"] = _mean([line.rounds for line in lines])
    facts["seconds"] = _mean([line.facts.get("seconds") for line in lines])
    facts["bytes"] = _mean([_last(line.curve.get("bytes", ())) for line in lines])
    available = {key: value for key, value in facts.items() if value is not None}
    if available.get("rounds") and "seconds" in available:
        available["seconds_a_round"] = available["seconds"] / available["rounds"]
    if gbit is not None and "bytes" in available:
        available["communication_seconds"] = available["bytes"] * 8 / (gbit * 1e9)
    return available


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


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
    """The document's values of a row by metric."""
    values = stated_values(view.info.document) if view.document else []
    return {
        value.metric: value
        for value in values
        if (method is None or value.method == method) and value.holds_for(case) and not value.at
    }


def _document_row(
    names: int, columns: Sequence[tuple[str, str, Shown]], stated: Mapping[str, StatedValue], label: str = ""
) -> list[TableCell]:
    """A row of the document's numbers, below the measured one; `label` is that of the document, if it has another."""
    cells = [
        TableCell(stated[key].word + shown(stated[key].number) if key in stated else MISSING, italic=True)
        for key, _, shown in columns
    ]
    first = f"{STATED}: {label}" if label else STATED
    return [TableCell(first, italic=True), *(TableCell("") for _ in range(names - 1)), *cells]


STATED = "paper"


def _sources(rows: Sequence[Sequence[TableCell]]) -> list[str]:
    stated = any(row[0].text.startswith(STATED) for row in rows)
    return ["Rows in italics are the paper's numbers."] if stated else []


def pretraining_tables(results: Results) -> list[StudyTable]:
    """One table with a row for each pre-training that runs start from; none for a study without."""
    pretrained = [results.lines.get(entry.digest, entry).at(entry) for entry in results.info.pretrained]
    if not pretrained:
        return []
    caption = (
        "What runs start from. Their images and times are in no other number of this page; an image of which two views "
        "are trained on counts once. A pre-training is done once for all seeds and kept in the user's cache."
    )
    head = ("pre-training", "status", "rounds", "images", "CPU time", "last value")
    notes = [f"{row.method}: {row.reason}" for row in pretrained if row.reason]
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
