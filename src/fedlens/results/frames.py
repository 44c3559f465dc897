"""The results of a study as rows: one a run and one a cell, for CSV, Parquet, pandas and LaTeX.

Everything but the last columns of a row, `WALL_CLOCK`, is the same however often a study was interrupted.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.errors import FedlensError
from fedlens.base.format import MISSING, split_of
from fedlens.files.atomic_files import write_atomically
from fedlens.results.cells import better, chosen_values, effective_rate
from fedlens.results.rows import EFFECTIVE, Results, Row
from fedlens.results.statistics import Interval, PairedTest, deviation
from fedlens.results.study_table import Column, StudyTable, TableCell, TableView, csv_text
from fedlens.results.words import (
    INTERVAL,
    bold_words,
    metric_name,
    own_populations,
    p_text,
    seeds_text,
    tuning_words,
    unit,
)

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]

WALL_CLOCK = ("seconds", "cpu_seconds")
_SUMS = ("examples", "batches", "bytes", "bytes_client")
_FIRST_FACTS = (EFFECTIVE, *WALL_CLOCK)  # these have a place of their own in a row


def run_rows(results: Results) -> list[Record]:
    """One row for each run that has a line, in the order of the plan; a run that is in two cells has two rows.

    Columns: study, method, label, role, seed, each dimension of the cases, each tuned setting, effective_lr, status,
    reason, rounds; the final value of each metric (the mean of the last `last` evaluations) and the best value of the
    compared one; the sums of the last evaluation (examples, batches, bytes, bytes_client); other facts; version,
    directory; and last the wall-clock columns.
    """
    done = [row for row in results.rows if row.status is not None]
    settings = [name for name in _names(row.point for row in done) if name != EFFECTIVE]
    compared = list(dict.fromkeys(results.measured(row.role) for row in done))
    metrics = [name for name in _names(row.curve for row in done) if _is_metric(name)]
    facts = [name for name in _names(row.facts for row in done) if name not in _FIRST_FACTS]
    sums = [name for name in _SUMS if any(name in row.curve for row in done)]
    rows = []
    for run in done:
        metric = results.measured(run.role)
        problem = run.problem(metric)
        row = {
            "study": results.info.name,
            "method": run.method,
            "label": results.info.methods.get(run.method, run.method),
            "role": run.role,
            "seed": run.seed,
            **{name: run.case.get(name) for name in results.info.dimensions if name != EFFECTIVE},
            **{name: run.point.get(name) for name in settings},
            EFFECTIVE: effective_rate(run),
            "status": run.status,
            "reason": run.reason or problem,
            "rounds": run.rounds,
            **{
                name: None if name == metric and problem else run.final(name, results.info.last)
                for name in metrics
            },
            **{f"best_{name}": _best(run, name) if name == metric else None for name in compared},
            **{name: run.last(name) for name in sums},
            **{name: run.facts.get(name) for name in facts},
            "version": run.version,
            "device": run.device,
            "directory": run.run,
        }
        rows.append({**row, **{name: run.facts.get(name) for name in WALL_CLOCK}})
    return rows


def cell_rows(results: Results) -> list[Record]:
    """One row for each method in each case.

    Columns: study, method, label, each dimension of the cases, the chosen value of each tuned setting, effective_lr (if
    all runs have the same); metric, mean, std, low, high (95 % t interval of the mean), n (runs with a value), runs,
    failed, reason; baseline, difference, difference_low, difference_high (95 % t interval, paired by seed), p
    (two-sided paired t test), adjusted_p (Holm over all cells), bold. A cell whose runs do not all have a value has no
    mean.
    """
    info, view = results.info, TableView(results, "cells")
    points = {id(cell): chosen_values(results, cell.method, cell.case) for cell in view.cells}
    settings = [name for name in _names(points.values()) if name != EFFECTIVE]
    tests = {id(each.cell): each for each in view.compared()}
    rows = []
    for cell in view.cells:
        interval, values = cell.interval, list(cell.values.values())
        comparison = tests.get(id(cell))
        test = comparison.test if comparison else None
        rows.append(
            {
                "study": info.name,
                "method": cell.method,
                "label": info.methods.get(cell.method, cell.method),
                **{name: cell.case.get(name) for name in info.dimensions if name != EFFECTIVE},
                **{name: points[id(cell)].get(name) for name in settings},
                EFFECTIVE: cell.rates.pop() if len(cell.rates) == 1 else None,
                "metric": results.metric,
                "mean": interval.mean if interval else None,
                "std": deviation(values) if interval else None,
                "low": interval.low if interval else None,
                "high": interval.high if interval else None,
                "n": len(values),
                "runs": cell.planned,
                "failed": len(cell.failed),
                "reason": "; ".join(dict.fromkeys(cell.failed.values())) or None,
                "baseline": info.baseline,
                "difference": test.difference.mean if test else None,
                "difference_low": test.difference.low if test else None,
                "difference_high": test.difference.high if test else None,
                "p": test.p if test else None,
                "adjusted_p": test.adjusted if test else None,
                "bold": comparison.bold if comparison else False,
            }
        )
    return rows


def cells_table(results: Results) -> StudyTable:
    """The cells as a table for LaTeX: mean, interval, runs, and the difference to the baseline."""
    view, info, metric = TableView(results, "cells"), results.info, results.metric
    compared = view.compared()
    tests = {id(each.cell): each for each in compared}

    def tested(text: Callable[[PairedTest], str]) -> list[TableCell]:
        found = [tests.get(id(cell)) for cell in view.cells]
        return [
            TableCell(text(each.test), bold=each.bold) if each and each.test else TableCell(MISSING)
            for each in found
        ]

    columns = [
        view.column("Mean", lambda cell: view.value(m.mean) if (m := cell.interval) else view.status(cell)),
        view.column("Interval", lambda cell: _bounds(view, cell.interval)),
        view.column("Runs", lambda cell: f"{len(cell.values)} of {cell.planned}"),
        Column("Difference", tested(lambda test: view.signed(test.difference.mean))),
        Column("Adjusted p", tested(lambda test: p_text(test.adjusted))),
    ]
    label = view.label(info.baseline)
    words = (
        f"{metric_name(metric)}{unit(metric)}: mean and {INTERVAL} over {seeds_text(info.seeds)}.",
        own_populations(info),
        f"Difference: to {label} in the same case, paired by seed{', in points' if unit(metric) else ''}.",
        *tuning_words(info),
        bold_words(compared, info, f"differs from {label}"),
    )
    return replace(view.table_of_cells(info.title or info.name, words, columns), caveats=info.caveats)


def write_frames(results: Results, folder: Path, parquet: bool | None = None) -> list[Path]:
    """Writes runs.csv, cells.csv and cells.tex, and with pandas and pyarrow runs.parquet and cells.parquet.

    Args:
        parquet: None writes Parquet files if both packages are installed, True needs them.

    Returns the paths. Raises `FedlensError` if `parquet` is true and a package is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frames = {"runs": run_rows(results), "cells": cell_rows(results)}
    files = {f"{name}.csv": to_csv(rows).encode() for name, rows in frames.items()}
    files["cells.tex"] = cells_table(results).to_latex().encode()
    installed = all(importlib.util.find_spec(name) is not None for name in ("pandas", "pyarrow"))
    if installed if parquet is None else parquet:
        files.update({f"{name}.parquet": to_parquet(rows) for name, rows in frames.items()})
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with a head; lists and tables as JSON, and None as an empty field.

    >>> to_csv([{"method": "fedavg", "alpha": 0.1, "channels": [8, 16], "p": None}])
    'method,alpha,channels,p\\nfedavg,0.1,"[8, 16]",\\n'
    """
    head = _names(rows)
    return csv_text([head, *([_plain(row.get(name)) for name in head] for row in rows)])


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as a Parquet file. Raises `FedlensError` if pandas or pyarrow is not installed."""
    buffer = BytesIO()
    frame = to_pandas(rows)
    try:
        frame.to_parquet(buffer, index=False)
    except ImportError:
        raise FedlensError("Parquet files need pyarrow", hint="pip install 'fedlens[pandas]'") from None
    return buffer.getvalue()


def to_pandas(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a pandas table with one type a column. Raises `FedlensError` if pandas is not installed.

    Whole numbers, numbers and truth values have the nullable types of pandas; a column of mixed values has texts.
    """
    try:
        import pandas as pd
    except ImportError:
        raise FedlensError("a pandas table needs pandas", hint="pip install 'fedlens[pandas]'") from None
    columns = {}
    for name in _names(rows):
        values = [row.get(name) for row in rows]
        kind = _column_type([value for value in values if value is not None])
        texts = [None if value is None else str(_plain(value)) for value in values]
        columns[name] = pd.array(texts if kind == "string" else values, dtype=kind)
    return pd.DataFrame(columns)


def _column_type(values: Sequence[Any]) -> str:
    kinds = {type(value) for value in values}
    if kinds and kinds <= {bool}:
        return "boolean"
    if kinds and kinds <= {int}:
        return "Int64"
    return "Float64" if kinds and kinds <= {int, float} else "string"


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | list | tuple | Mapping) else value


def _names(tables: Any) -> list[str]:
    """The keys of all tables, in the order in which they first occur."""
    return list(dict.fromkeys(name for table in tables for name in table))


def _is_metric(name: str) -> bool:
    return split_of(name) is not None or name.startswith("clients_")


def _best(line: Row, metric: str) -> float | None:
    values = [value for _, value in line.series(metric)] if line.status != "failed" else []
    return max(values, key=lambda value: better(metric, value), default=None)


def _bounds(view: TableView, mean: Interval | None) -> str:
    if mean is None or mean.low is None or mean.high is None:
        return MISSING
    return f"[{view.value(mean.low)}, {view.value(mean.high)}]"
