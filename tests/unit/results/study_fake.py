"""Studies made of numbers: results without runs, for tests of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.results.figures.chart import Chart
from fedlens.results.rows import Results, Row, StudyInfo
from fedlens.results.study_table import StudyTable

Scores = Mapping[
    str, Sequence[Any]
]  # by method: a final value, a curve, or a reason for failing, a seed each


def results_of(
    scores: Scores | Mapping[float, Scores],
    *,
    metric: str = "test_accuracy",
    x: Mapping[str, Sequence[float]] | None = None,
    facts: Mapping[str, float] | None = None,
    **info: Any,
) -> Results:
    """Results with the values given by method, or by alpha and method; the first method is the baseline.

    A value is the final one, or a list of values of a curve, or a text: the reason why the run failed. None is a run
    that is not finished.
    """
    by_case: dict[str, Any] = dict(scores)  # type: ignore[arg-type]
    plain = all(isinstance(key, str) for key in by_case)
    cases: list[dict[str, Any]] = [{}] if plain else [{"data.partition.alpha": alpha} for alpha in by_case]
    tables = [by_case] if plain else list(by_case.values())
    entries, lines = [], {}
    for case, table in zip(cases, tables, strict=True):
        for method, values in table.items():
            for seed, value in enumerate(values):
                digest = f"{method}-{case}-{seed}"
                entries.append(Row.planned(digest, f"run-{digest}", method, case, {}, "final", seed))
                if value is not None:
                    lines[digest] = _line(digest, value, metric, x, facts or {})
    methods = {method: method for table in tables for method in table}
    first = next(iter(methods))
    dimensions = {} if plain else {"data.partition.alpha": "alpha"}
    seeds = range(max(len(values) for table in tables for values in table.values()))
    known: dict[str, Any] = {
        "name": "study", "title": "A study", "seeds": list(seeds), "metric": metric, "last": 1, "targets": [],
        "baseline": first, "methods": methods, "dimensions": dimensions, "cases": cases, "entries": entries,
    }  # fmt: skip
    return Results(StudyInfo(**{**known, **info}), lines)


def words_of(shown: StudyTable | Chart) -> str:
    """The caption and the notes of a table or a figure."""
    return " ".join([shown.caption, *shown.notes])


def _line(digest: str, value: Any, metric: str, x: Any, facts: Mapping[str, float]) -> Row:
    if isinstance(value, str):
        return Row(digest, f"run-{digest}", "failed", value, 1, metric, {"round": [1], metric: [0.1]})
    values = value if isinstance(value, list) else [value]
    rounds = [float(k + 1) for k in range(len(values))]
    columns = {
        "round": rounds, "examples": [100 * k for k in rounds], "batches": [10 * k for k in rounds],
        "bytes": [1e6 * k for k in rounds], "bytes_client": [1e5 * k for k in rounds], "elapsed": rounds,
        **(x or {}), metric: values,
    }  # fmt: skip
    facts = {"seconds": 1.5, "cpu_seconds": 1.25, **facts}
    return Row(digest, f"run-{digest}", "finished", None, len(values), metric, columns, facts, version="1.0")
