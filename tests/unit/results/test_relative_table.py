"""Tables of relative accuracy, and the document's rows in a summary."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from fedlens.base.errors import ConfigError
from fedlens.results.study_table import StudyTable
from fedlens.results.tables import study_table
from tests.unit.results.study_fake import results_of, words_of


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


def test_a_reference_of_zero_is_named_with_its_seed() -> None:
    table = make({"fedavg": [0.4, 0.6], "centralized": [0.8, 0.0]}, "relative")
    assert texts(table)[0][1] == "50.0"
    assert "No ratio where the value to divide by is 0: centralized (one seed (1))." in words_of(table)
    assert "No ratio" not in words_of(make({"fedavg": [0.4], "centralized": [0.8]}, "relative"))


def test_losses_of_the_reference_are_written_as_in_a_summary() -> None:
    losses = {"fedavg": [0.9, 1.1], "centralized": [0.4567, 0.4712]}
    (_, relative), (_, summary) = (
        texts(make(losses, kind, metric="test_loss")) for kind in ("relative", "summary")
    )
    assert relative[1] == summary[1] == "0.4639 ± 0.092"


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
    assert table.notes[-1:] == ['"Paper": hsu2019, section 4.2.']
    assert len(make(scores, "summary", {"document": False}, document=document).rows) == 2
