"""Rows of runs and cells, and their files."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from fedlens.results.frames import WALL_CLOCK, cell_rows, run_rows, to_csv, to_pandas, write_frames
from fedlens.results.rows import Results, Row
from tests.unit.results.study_fake import results_of

SCORES = {
    "fedavg": [[0.5, 0.70], [0.8, 0.72], [0.5, 0.71]],
    "fedavgm": [0.75, 0.78, 0.79],
    "fedadam": [0.7, "the loss is not finite", 0.7],
}


def study(**info: object) -> Results:
    return results_of({0.1: SCORES, 1.0: SCORES}, facts={"effective_lr": 0.1, "emd": 1.5}, **info)


def test_a_run_is_a_row_with_its_place_its_values_and_its_sums() -> None:
    rows = run_rows(study())
    assert len(rows) == 18
    row = rows[1]
    expected = {
        "study": "study", "method": "fedavg", "label": "fedavg", "role": "final", "seed": 1,
        "data.partition.alpha": 0.1, "effective_lr": 0.1, "status": "finished", "reason": None, "rounds": 2,
        "test_accuracy": 0.72, "best_test_accuracy": 0.8, "examples": 200.0, "batches": 20.0, "bytes": 2e6,
        "bytes_client": 2e5, "emd": 1.5, "version": "1.0", "seconds": 1.5, "cpu_seconds": 1.25,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["directory"].startswith("run-fedavg")


def test_wall_clock_columns_are_the_last() -> None:
    rows = run_rows(study())
    assert all(tuple(row)[-len(WALL_CLOCK) :] == WALL_CLOCK for row in rows)
    assert len({tuple(row) for row in rows}) == 1
    assert not {*WALL_CLOCK} & {*cell_rows(study())[0]}


def test_a_failed_run_has_its_reason_and_no_value() -> None:
    row = next(row for row in run_rows(study()) if row["status"] == "failed")
    assert (row["method"], row["seed"], row["reason"]) == ("fedadam", 1, "the loss is not finite")
    assert (row["test_accuracy"], row["best_test_accuracy"]) == (None, None)


def test_a_run_that_ended_without_a_finite_loss_has_its_reason() -> None:
    results = results_of({"fedavg": [[0.7, 0.1]]})
    ((digest, line),) = results.lines.items()
    line = replace(line, curve={**line.curve, "test_loss": [1.0, None]})
    row = run_rows(Results(results.info, {digest: line}))[0]
    assert (row["reason"], row["test_accuracy"]) == ("test_loss is not finite in round 2", None)


def test_an_effective_rate_that_is_a_setting_has_one_column() -> None:
    results = results_of({"fedavg": [0.5]})
    entries = [replace(results.info.entries[0], point={"effective_lr": 0.3})]
    results = Results(replace(results.info, entries=entries), results.lines)
    assert (run_rows(results)[0]["effective_lr"], cell_rows(results)[0]["effective_lr"]) == (0.3, 0.3)


def test_a_run_without_a_line_has_no_row() -> None:
    assert len(run_rows(results_of({"fedavg": [0.5, None]}))) == 1


def test_tuning_runs_are_rows_with_their_point_and_their_validation_value() -> None:
    results = results_of({"fedavg": [0.5]}, tuning={"seeds": [100]})
    line = replace(next(iter(results.lines.values())), curve={"round": [1], "validation_accuracy": [0.4]})
    entry = Row.planned("t", "tuning", "fedavg", {}, {"local.lr": 0.1}, "tune", 100)
    entries = [replace(results.info.entries[0], point={"local.lr": 0.1}), entry]
    results = Results(replace(results.info, entries=entries), {**results.lines, "t": line})
    final, tune = run_rows(results)
    assert (tune["role"], tune["local.lr"], tune["validation_accuracy"], tune["test_accuracy"]) == (
        "tune", 0.1, 0.4, None,
    )  # fmt: skip
    assert (final["best_validation_accuracy"], tune["best_validation_accuracy"]) == (None, 0.4)
    assert list(final).index("best_validation_accuracy") == list(final).index("best_test_accuracy") + 1
    assert cell_rows(results)[0]["local.lr"] == 0.1


def test_a_cell_is_a_row_with_its_interval_and_its_test() -> None:
    rows = cell_rows(study())
    assert [(row["method"], row["data.partition.alpha"]) for row in rows] == [
        (method, alpha) for alpha in (0.1, 1.0) for method in SCORES
    ]
    base, row = rows[0], rows[1]
    values = [0.75, 0.78, 0.79]
    low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((sum(values) / 3, low, high))
    assert row["std"] == pytest.approx(stats.tstd(values))
    test = stats.ttest_rel(values, [0.70, 0.72, 0.71])
    assert (row["p"], row["adjusted_p"]) == pytest.approx((test.pvalue, 2 * test.pvalue))
    low, high = test.confidence_interval(0.95)
    found = (row["difference"], row["difference_low"], row["difference_high"])
    assert found == pytest.approx((0.19 / 3, low, high))
    assert (base["difference"], base["p"], base["n"], base["runs"]) == (None, None, 3, 3)
    assert row["bold"] is False  # three seeds


def test_a_cell_with_a_failed_run_has_no_mean_and_the_reason() -> None:
    row = cell_rows(study())[2]
    assert (row["mean"], row["difference"], row["n"], row["failed"]) == (None, None, 2, 1)
    assert row["reason"] == "the loss is not finite"


def test_csv_gives_the_numbers_back(tmp_path: Path) -> None:
    rows = run_rows(study())
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [float(row["test_accuracy"]) for row in read[:3]] == [0.70, 0.72, 0.71]
    assert read[7]["test_accuracy"] == ""
    assert [*read[0]] == [*rows[0]]


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_frames(study(), tmp_path / "a")]
    again = Results(study().info, dict(reversed(study().lines.items())))
    second = [path.read_bytes() for path in write_frames(again, tmp_path / "b")]
    assert first == second


def test_parquet_gives_the_rows_back_with_their_types(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    paths = {path.name: path for path in write_frames(study(), tmp_path)}
    assert {*paths} == {"runs.csv", "cells.csv", "cells.tex", "runs.parquet", "cells.parquet"}
    table = pandas.read_parquet(paths["runs.parquet"])
    rows = run_rows(study())
    assert list(table.columns) == [*rows[0]]
    assert table["test_accuracy"].isna().sum() == 2
    assert list(table["seed"]) == [row["seed"] for row in rows]
    cells = pandas.read_parquet(paths["cells.parquet"])
    assert cells["mean"].iloc[1] == pytest.approx(cell_rows(study())[1]["mean"])


def test_a_column_of_mixed_values_has_texts() -> None:
    pytest.importorskip("pandas")
    table = to_pandas([{"a": 0.1, "b": 1, "c": True}, {"a": "none", "b": 2.5}, {"a": [1, 2], "b": None}])
    assert list(table["a"]) == ["0.1", "none", "[1, 2]"]
    assert [str(kind) for kind in table.dtypes] == ["string", "Float64", "boolean"]


def test_the_latex_of_the_cells_has_a_row_for_each(tmp_path: Path) -> None:
    write_frames(study(), tmp_path, parquet=False)
    text = (tmp_path / "cells.tex").read_text(encoding="utf-8")
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert body.count(r" \\") == 6
    assert "failed (1 of 3)" in body
    assert not (tmp_path / "runs.parquet").exists()
