"""The tables of what a study trains on and what its models cost."""

from __future__ import annotations

import pytest

from fedlens.base.errors import DataError
from fedlens.data.partition.partition import Partition
from fedlens.results.data_json import CasePopulation, CellCost, cost_values, population_values, read_costs
from fedlens.results.data_tables import cost_facts, population_facts
from fedlens.results.rows import Results, Row, StudyInfo
from fedlens.results.tables import study_table

ALPHA = "data.partition.alpha"
CASES = [{ALPHA: 0.1}, {ALPHA: 1.0}]


def _results(document: dict[str, object] | None = None, finished: bool = True) -> Results:
    partitions = [
        Partition.of_owners([0, 0, 0, 1], 2, dataset="four").counted([0, 0, 0, 1]),
        Partition.of_owners([0, 0, 1, 1], 2, dataset="four").counted([0, 1, 0, 1]),
    ]
    populations = [CasePopulation.of(p, case) for p, case in zip(partitions, CASES, strict=True)]
    costs = [
        CellCost("", m, case, m, [3, 8, 8], 2, parameters, parameters - frozen, 90, 1_500_000, 4, 2_000_000)
        for m, parameters, frozen in (("small", 100, 0), ("large", 900, 800))
        for case in CASES
    ]
    entries, lines = [], {}
    for method in ("small", "large"):
        for case in CASES:
            for seed, seconds in ((0, 10.0), (1, 30.0)):
                digest = f"{method}{case[ALPHA]}{seed}"
                entries.append(Row.planned(digest, digest, method, case, {}, "final", seed))
                curve = {"round": [0, 5], "bytes": [0.0, 2.5e9], "test_accuracy": [0.1, 0.5]}
                status = "finished" if finished else "failed"
                facts = {"seconds": seconds, "parameters": 1.0, "multiply_adds": 2.0}
                lines[digest] = Row(digest, digest, status, None, 5, "test_accuracy", curve, facts)
    info = StudyInfo(
        "s", "", [0, 1], None, 1, [], "small", {"small": "Small", "large": "Large"}, {ALPHA: "alpha"}, CASES,
        document=document or {}, entries=entries,
    )  # fmt: skip
    return Results(info, lines, {"populations": population_values(populations), "costs": cost_values(costs)})


def _texts(results: Results, spec: dict[str, object]) -> list[list[str]]:
    table = study_table(results, spec)
    return [list(table.head), *([cell.text for cell in row] for row in table.rows)]


def test_the_data_of_each_case_are_one_row() -> None:
    head, *rows = _texts(_results(), {"kind": "datasets"})
    assert head[:6] == ["alpha", "dataset", "clients", "classes", "examples", "smallest client"]
    assert rows[0] == ["0.1", "four", "2", "2", "4", "1", "3", "1", "0.75"]
    assert rows[1] == ["1", "four", "2", "2", "4", "2", "2", "2", "0"]


def test_only_the_cases_of_the_table_are_shown() -> None:
    assert len(_texts(_results(), {"kind": "datasets", "where": {ALPHA: 1.0}})) == 2


def test_the_weighted_mean_of_the_distances_is_that_of_the_census() -> None:
    # Shares of the population: 3/4 and 1/4. Distances 0.5 and 1.5, weights 3 and 1.
    population = CasePopulation.of(Partition.of_owners([0, 0, 0, 1], 2).counted([0, 0, 0, 1]), {})
    facts = population_facts(population)
    assert facts["emd"] == pytest.approx((3 * 0.5 + 1 * 1.5) / 4)
    assert facts["imbalance"] == 1.5


def test_numbers_of_the_document_stand_below_the_measured_ones() -> None:
    document = {
        "values": [
            {"method": "small", "metric": "clients", "value": 100, "case": {ALPHA: 0.1}, "where": "table 9"},
            {"method": "small", "metric": "test_accuracy", "value": 0.5, "where": "table 9"},
        ]
    }
    table = study_table(_results(document), {"kind": "datasets"})
    assert [cell.text for cell in table.rows[1]][:4] == ["paper", "", "100", "–"]
    assert table.rows[1][2].italic
    assert table.notes == ["Rows in italics are the paper's numbers."]
    assert len(table.rows) == 3
    assert len(study_table(_results(document), {"kind": "datasets", "document": False}).rows) == 2


def test_costs_are_counts_and_means_over_seeds() -> None:
    head, *rows = _texts(_results(), {"kind": "efficiency", "memory": True, "gbit": 10.0})
    small = dict(zip(head, rows[0], strict=True))
    assert small == {
        "method": "Small", "alpha": "0.1", "parameters": "100", "trained": "100", "without classifier": "90",
        "multiply-adds": "1.5 million", "batch": "4", "memory": "2.0 MB", "estimated": "–", "rounds": "5",
        "time a round": "4.0 s", "total time": "20 s", "sent": "2.5 GB", "sending at 10 Gbit/s": "2.0 s",
    }  # fmt: skip
    assert dict(zip(head, rows[2], strict=True))["trained"] == "100"


def test_costs_without_runs_have_no_time() -> None:
    head, *rows = _texts(_results(), {"kind": "efficiency", "runs": False})
    assert head == ["method", "alpha", "parameters", "trained", "without classifier", "multiply-adds"]
    assert len(rows) == 4


def test_failed_runs_give_no_time() -> None:
    head, row, *_ = _texts(_results(finished=False), {"kind": "efficiency"})
    assert dict(zip(head, row, strict=True))["total time"] == "–"


def test_counts_of_the_model_come_before_those_that_a_run_recorded() -> None:
    line = Row("d", "r", "finished", None, 1, "test_accuracy", {}, {"parameters": 7.0})
    assert cost_facts(None, [line])["parameters"] == 7.0
    assert cost_facts(CellCost("", "m", {}, "m", [1], 2, 5, 5), [line])["parameters"] == 5


def test_a_reason_stands_where_memory_was_not_measured() -> None:
    results = _results()
    results.data["costs"][0]["reason"] = "the machine is out of memory"  # type: ignore[index]
    notes = study_table(results, {"kind": "efficiency", "memory": True}).notes
    assert notes[-1:] == ["Small: memory was not measured: the machine is out of memory."]


@pytest.mark.parametrize(("kind", "what"), [("datasets", "populations"), ("efficiency", "costs")])
def test_a_table_without_its_data_says_what_to_do(kind: str, what: str) -> None:
    empty = Results(_results().info, {})
    with pytest.raises(DataError, match=rf"data\.json has no {what}"):
        study_table(empty, {"kind": kind})


def test_damaged_costs_are_refused() -> None:
    with pytest.raises(DataError, match="costs of models are corrupt"):
        read_costs([{"method": "m"}])
