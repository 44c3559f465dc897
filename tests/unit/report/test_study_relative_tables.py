"""Tables of relative accuracy, ranks, clients, and the document's rows in a summary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from fedlens.base.errors import ConfigError
from fedlens.report.study_results import StudyResults
from fedlens.report.study_tables import check_tables, study_table
from fedlens.report.table_format import StudyTable
from tests.unit.report.study_fake import results_of

RANKS = [{"kind": "summary"}, {"kind": "ranks"}]


def texts(table: StudyTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def make(scores: Any, kind: str, spec: dict[str, Any] | None = None, **info: Any) -> StudyTable:
    return study_table(results_of(scores, **info), {"kind": kind, **(spec or {})})


def test_relative_accuracy_is_the_ratio_at_each_seed() -> None:
    table = make({"fedavg": [0.4, 0.6], "centralized": [0.8, 0.75]}, "relative")
    ratios = [0.5, 0.8]
    low, high = stats.t.interval(0.95, 1, 0.65, stats.sem(ratios))
    assert texts(table)[0] == ["fedavg", f"65.0 ± {50 * (high - low):.1f}"]
    assert texts(table)[1][0] == "centralized: test accuracy (%)"
    assert texts(table)[1][1].startswith("77.5 ±")


def test_relative_accuracy_needs_the_centralized_runs() -> None:
    table = make({"fedavg": [0.4, 0.6], "centralized": [0.8, "out of memory"]}, "relative")
    assert texts(table)[0][1] == "centralized: failed (1 of 2)"
    with pytest.raises(ConfigError, match=r"no method 'centralised' .*did you mean 'centralized'"):
        make({"fedavg": [0.4], "centralized": [0.8]}, "relative", {"to": "centralised"})


def test_the_documents_relative_accuracy_is_the_ratio_of_what_it_states() -> None:
    values = [
        {"method": "centralized", "metric": "test_accuracy", "where": "table 1", "value": 0.8},
        {"method": "fedavg", "metric": "test_accuracy", "where": "text", "about": 0.4},
    ]
    table = make(
        {"fedavg": [0.4], "centralized": [0.8]}, "relative", document={"source": "d", "values": values}
    )
    assert texts(table) == [
        ["fedavg", "50.0", "about 50.0"], ["centralized: test accuracy (%)", "80.0", "80.0"],
    ]  # fmt: skip


def test_a_summary_shows_the_papers_numbers_beside_the_measured_ones() -> None:
    case = {"data.partition.alpha": 0.1}
    values = [
        {"method": "fedavgm", "metric": "test_accuracy", "where": "4.2", "case": case, "low": 0.75},
        {"method": "centralized", "metric": "test_accuracy", "where": "4.1", "value": 0.86},
    ]  # fmt: skip
    scores = {0.1: {"fedavg": [0.3], "fedavgm": [0.7]}, 1.0: {"fedavg": [0.6], "fedavgm": [0.8]}}
    document = {"source": "hsu2019, section 4.2", "values": values}
    table = make(scores, "summary", document=document, smaller=[["rounds", "10,000", "10"]])
    assert texts(table) == [
        ["fedavg", "30.0", "–", "60.0", "–"], ["fedavgm", "70.0", "above 75.0", "80.0", "–"],
        ["not run", "–", "86.0 (centralized)", "–", "86.0"],
    ]  # fmt: skip
    assert table.notes == ['"Paper": hsu2019, section 4.2.']
    assert len(make(scores, "summary", {"document": False}, document=document).rows) == 2


CASES = {
    0.1: {"a": [0.9, 0.8], "b": [0.6, 0.6], "c": [0.5, 0.5]},
    0.5: {"a": [0.9, 0.9], "b": [0.7, 0.6], "c": [0.7, 0.4]},
    1.0: {"a": [0.6, 0.6], "b": [0.9, 0.9], "c": [0.5, 0.5]},
}


def test_ranks_are_means_over_cases_with_the_friedman_test_and_the_critical_difference() -> None:
    table = study_table(results_of(CASES, tables=RANKS), {"kind": "ranks"})
    assert texts(table) == [["a", "1.33", "3"], ["b", "1.67", "3"], ["c", "3.00", "3"]]
    found = stats.friedmanchisquare([0.85, 0.9, 0.6], [0.6, 0.65, 0.9], [0.5, 0.55, 0.5])
    assert f"chi-squared {found.statistic:.4g}, p {found.pvalue:.3f}" in table.caption
    assert "Critical difference (Nemenyi, 5 %): 1.91" in table.caption


def test_cases_with_failed_runs_are_not_ranked_and_named() -> None:
    cases = {**CASES, 1.0: {**CASES[1.0], "b": [0.9, "out of memory"]}}
    table = study_table(results_of(cases, tables=RANKS), {"kind": "ranks"})
    assert [row[2] for row in texts(table)] == ["2", "2", "2"]
    assert "Left out, since runs failed or are not finished: alpha 1." in table.caption


def test_methods_with_too_few_examples_are_not_ranked_and_named() -> None:
    results = results_of(CASES, tables=RANKS)
    lines = {
        digest: replace(line, curve={**line.curve, "examples": [10_000.0]}) if digest[0] != "c" else line
        for digest, line in results.lines.items()
    }
    table = study_table(StudyResults(results.info, lines), {"kind": "ranks", "least_examples": 10_000})
    assert [row[0] for row in texts(table)] == ["a", "b"]
    assert "Not ranked, with fewer than 10,000 examples: c." in table.caption


def test_the_smallest_loss_ranks_first() -> None:
    table = study_table(results_of(CASES, metric="test_loss", tables=RANKS), {"kind": "ranks"})
    assert texts(table)[0][0] == "c"


def test_ranks_are_never_the_only_table() -> None:
    with pytest.raises(ConfigError, match=r"'ranks' is the only one: ranks hide"):
        check_tables([{"kind": "ranks"}, {"kind": "ranks"}])
    with pytest.raises(ConfigError, match=r"'ranks' is the only one"):
        study_table(results_of(CASES, tables=[{"kind": "ranks"}]), {"kind": "ranks"})
    check_tables(RANKS)


def test_ranks_of_one_case_are_refused() -> None:
    with pytest.raises(ConfigError, match="the table has 2 methods and 1 case"):
        study_table(results_of({"a": [0.1], "b": [0.2]}, tables=RANKS), {"kind": "ranks"})


def test_the_values_over_clients_have_a_row_for_each_method() -> None:
    columns = {
        "clients_accuracy_mean": [0.7],
        "clients_accuracy_std": [0.1],
        "clients_accuracy_worst_decile": [0.4],
    }
    table = make({"fedavg": [0.7], "ditto": [0.8]}, "clients", x=columns)
    assert table.head == ["Method", "Mean", "Deviation", "Worst tenth"]
    assert texts(table) == [["fedavg", "70.0", "10.0", "40.0"], ["ditto", "70.0", "10.0", "40.0"]]
    without = make({"fedavg": [0.7]}, "clients")
    assert 'set "evaluation.clients" = "all"' in without.notes[-1]
