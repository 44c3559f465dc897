"""Tables of progress: values at budgets, and what a target takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from fedlens.base.errors import ConfigError
from fedlens.results.rows import Results
from fedlens.results.study_table import StudyTable
from fedlens.results.tables import study_table
from tests.unit.results.study_fake import results_of, words_of

# In the fake results a round takes 10 batches, 1 MB for all clients and 0.1 MB for one.
CURVES = {
    "fedavg": [[0.1, 0.2, 0.4, 0.5], [0.1, 0.4, 0.4, 0.6]],
    "fedavgm": [[0.3, 0.5, 0.6, 0.8], [0.3, 0.5, 0.6, 0.8]],
}


def texts(table: StudyTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def budgets(scores: Any = CURVES, info: dict[str, Any] | None = None, **spec: Any) -> StudyTable:
    return study_table(results_of(scores, **(info or {})), {"kind": "budgets", **spec})


def targets(scores: Any = CURVES, info: dict[str, Any] | None = None, **spec: Any) -> StudyTable:
    return study_table(results_of(scores, **(info or {})), {"kind": "targets", **spec})


def test_a_budget_has_the_mean_over_seeds_of_the_last_evaluation_within_it() -> None:
    table = budgets(rounds=[2, 4], batches=[25], bytes=[3e6], spread="none")
    assert table.head == ["Method", "at 2 rounds", "at 4 rounds", "at 25 batches", "at 3.0 MB"]
    # 25 batches are spent after round 2, as round 3 ends with 30.
    assert texts(table) == [
        ["fedavg", "30.0", "55.0", "30.0", "40.0"],
        ["fedavgm", "50.0", "80.0", "50.0", "60.0"],
    ]
    assert "Batches: those of the busiest client" in words_of(table)


def test_a_budget_has_the_interval_over_seeds() -> None:
    low, high = stats.t.interval(0.95, 1, 0.3, stats.sem([0.2, 0.4]))
    assert texts(budgets(rounds=[2]))[0] == ["fedavg", f"30.0 ± {50 * (high - low):.1f}"]


def test_a_budget_beyond_the_end_of_the_runs_has_no_value() -> None:
    table = budgets(rounds=[4, 5])
    assert [row[2] for row in texts(table)] == ["–", "–"]
    assert "–: the runs end before." in words_of(table)


def test_a_cell_with_a_failed_run_has_no_values_at_budgets() -> None:
    table = budgets({**CURVES, "fedadam": [[0.1, 0.2, 0.3, 0.4], "out of memory"]}, rounds=[1])
    assert texts(table)[2] == ["fedadam", "failed (1 of 2)"]
    assert table.notes[-1:] == ["fedadam: 1 of 2 runs failed: out of memory (seed 1)."]


def test_the_papers_values_stand_beside_the_measured_ones_with_their_budgets() -> None:
    values = [
        {"method": "fedavg", "metric": "test_accuracy", "where": "t", "at": {"rounds": 2}, "value": 0.47},
        {"method": "fedavg", "metric": "test_accuracy", "where": "t", "at": {"rounds": 1000}, "low": 0.75},
        {"method": "fedavgm", "metric": "test_loss", "where": "t", "at": {"rounds": 2}, "value": 0.1},
    ]
    info = {
        "document": {"source": "hsu2020, table 2", "values": values, "labels": {"fedavg": "FedAvg, K = 100"}},
        "smaller": [["rounds", "1,000", "4"]],
    }
    table = budgets(rounds=[2], info=info, spread="none")
    assert table.head == ["Method", "at 2 rounds", "Paper", "at 1,000 rounds", "Paper"]
    assert texts(table) == [
        ["fedavg", "30.0", "47.0 (FedAvg, K = 100)", "–", "above 75.0"], ["fedavgm", "50.0", "–", "–", "–"],
    ]  # fmt: skip
    assert table.notes[-1:] == ['"Paper": hsu2020, table 2.']
    assert len(budgets(rounds=[2], info=info, document=False).head) == 2


def test_a_target_has_the_mean_number_of_rounds_and_multipliers_of_the_row() -> None:
    table = targets(targets=[0.4, 0.5], measures=["rounds", "bytes"])
    assert table.head == ["Method", "Rounds to 40 %", "Rounds to 50 %", "Bytes to 40 %", "Bytes to 50 %"]
    assert texts(table) == [
        ["fedavg", "2.5 (1.0×)", "4 (1.6×)", "2.5 MB (1.0×)", "4.0 MB (1.6×)"],
        ["fedavgm", "2 (1.0×)", "2 (1.0×)", "2.0 MB (1.0×)", "2.0 MB (1.0×)"],
    ]
    assert "times as much as for the first target of the row" in words_of(table)


def test_multipliers_can_be_those_to_the_baseline_or_to_the_first_case() -> None:
    single = targets(targets=[0.5], measures=["batches"])
    assert texts(single) == [["fedavg", "40 (1.0×)"], ["fedavgm", "20 (0.5×)"]]
    cases = {0.1: CURVES, 1.0: {name: [[0.5, 0.6], [0.5, 0.6]] for name in CURVES}}
    first = targets(cases, targets=[0.5], measures=["rounds"], multipliers="case")
    assert [row[2] for row in texts(first)] == ["4 (1.0×)", "2 (1.0×)", "1 (0.2×)", "1 (0.5×)"]
    assert texts(targets(targets=[0.5], measures=["rounds"], multipliers="none"))[0][1] == "4"


def test_a_target_that_runs_do_not_reach_says_how_many() -> None:
    table = targets(targets=[0.4, 0.55, 0.9], measures=["rounds"])
    assert texts(table)[0][1:] == ["2.5 (1.0×)", "not reached by 1 of 2", "not reached by 2 of 2"]
    assert "Runs have 4 rounds." in table.notes
    one = targets({"fedavg": [[0.1, 0.2]]}, targets=[0.4, 0.5], measures=["rounds"])
    assert texts(one)[0][1:] == ["not reached", "not reached"]


def test_the_target_of_a_loss_is_reached_from_above() -> None:
    losses = {"fedavg": [[3.0, 2.0, 1.0]]}
    table = targets(losses, {"metric": "test_loss", "targets": [2.0]}, measures=["rounds"])
    assert texts(table)[0][1] == "2 (1.0×)"
    assert "at most the target" in words_of(table)
    assert table.head[1] == "Rounds to 2"


def test_targets_can_be_shares_of_the_centralized_value() -> None:
    scores = {"fedavg": [[0.1, 0.4, 0.7]], "centralized": [[0.5, 0.7, 0.8]]}
    table = targets(scores, targets=[0.5, 0.9], measures=["rounds"], relative=True)
    assert table.head[1] == "Rounds to 50 % of centralized"
    assert texts(table)[0][1:] == ["2 (1.0×)", "not reached"]  # 0.4 and 0.72
    scores = {"fedavg": [[0.1, 0.38, 0.7]] * 2, "centralized": [[0.1, 0.2, 0.8], [0.1, 0.2, 0.6]]}
    both = targets(scores, targets=[0.5], measures=["rounds"], relative=True)
    assert texts(both)[0][1] == "2 (1.0×)"  # 0.35, half of the mean over seeds


def test_the_documents_rounds_to_a_relative_target_stand_in_tables_of_relative_targets_alone() -> None:
    entry = {"method": "fedavg", "metric": "test_accuracy", "where": "table 5", "value": 165}
    info = {"document": {"source": "s", "values": [{**entry, "at": {"relative_target": 0.5}}]}}
    scores = {**CURVES, "centralized": CURVES["fedavgm"]}
    table = targets(scores, info, targets=[0.5], measures=["rounds"], relative=True)
    assert texts(table)[0][2] == "165"
    assert "Paper" not in targets(scores, info, targets=[0.5]).head


def test_the_documents_rounds_to_a_target_are_numbers_of_rounds() -> None:
    entries = [
        {"method": "fedavg", "metric": "test_accuracy", "where": "t", "at": {"target": 0.4}, "value": 4912},
        {"method": "fedavg", "metric": "test_accuracy", "where": "t", "at": {"target": 0.5}, "low": 50000},
    ]
    info = {"document": {"source": "s", "values": entries}}
    table = targets(info=info, targets=[0.4, 0.5], measures=["rounds"])
    assert table.head == ["Method", "Rounds to 40 %", "Paper", "Rounds to 50 %", "Paper"]
    assert texts(table)[0][2::2] == ["4,912", "above 50,000"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "budgets"}, "needs a budget .tables.; set rounds, batches or bytes"),
        (
            {"kind": "budgets", "rounds": [1, "many"]},
            r"'rounds' is \[1, 'many'\], but number 2 in it must be a number",
        ),
        ({"kind": "budgets", "rouns": [1]}, "did you mean 'rounds'"),
        ({"kind": "targets"}, "needs a target"),
        (
            {"kind": "targets", "targets": [0.5], "measures": ["days"]},
            "number 1 in it must be 'rounds', 'batches' or 'bytes'",
        ),
        ({"kind": "targets", "targets": [0.5], "relative": True}, "no method 'centralized'"),
    ],
)
def test_tables_of_progress_that_cannot_be_are_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_table(results_of(CURVES), spec)


def test_a_column_that_no_run_has_is_no_number() -> None:
    results = results_of({"fedavg": [[0.1, 0.5]]}, targets=[0.5])
    lines = {
        digest: replace(line, curve={key: value for key, value in line.curve.items() if key != "bytes"})
        for digest, line in results.lines.items()
    }
    table = study_table(Results(results.info, lines), {"kind": "targets", "measures": ["bytes"]})
    assert texts(table)[0][1] == "–"
