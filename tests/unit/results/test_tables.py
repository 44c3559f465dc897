"""The tables of a study: their numbers, their words, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from fedlens.base.errors import ConfigError
from fedlens.results.rows import Results, Row
from fedlens.results.study_table import StudyTable
from fedlens.results.tables import TABLES, check_tables, default_tables, study_table, study_tables
from tests.unit.results.study_fake import results_of, words_of

AVG, BETTER = [0.70, 0.72, 0.71, 0.74, 0.69], [0.75, 0.78, 0.76, 0.77, 0.75]
NOISE = [0.71, 0.70, 0.73, 0.72, 0.70]
SCORES = {"fedavg": AVG, "fedavgm": BETTER, "fedprox": NOISE}
TUNING = {"on": "validation", "share": 0.1, "seeds": [100, 101], "own_seeds": True, "budget": 12}


def texts(table: StudyTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def bold(table: StudyTable) -> list[str]:
    return [cell.text for row in table.rows for cell in row if cell.bold]


def make(scores: Any, kind: str, spec: dict[str, Any] | None = None, **info: Any) -> StudyTable:
    return study_table(results_of(scores, **info), {"kind": kind, **(spec or {})})


def test_a_summary_has_the_mean_and_half_the_t_interval() -> None:
    table = make({"fedavg": [0.7, 0.72, 0.77]}, "summary")
    assert table.head == ["Method", "value"]
    assert texts(table) == [["fedavg", "73.0 ± 9.0"]]
    low, high = stats.t.interval(0.95, 2, 0.73, stats.sem([0.7, 0.72, 0.77]))
    assert f"{50 * (high - low):.1f}" == "9.0"
    assert "half the 95 % t interval of the mean over 3 seeds (0 to 2)" in words_of(table)


def test_a_summary_with_deviations_says_so() -> None:
    table = make({"fedavg": [0.7, 0.72, 0.77]}, "summary", {"spread": "deviation", "digits": 2})
    assert texts(table) == [["fedavg", "73.00 ± 3.61"]]
    assert "mean ± standard deviation over" in words_of(table)
    assert texts(make({"fedavg": [0.7, 0.72]}, "summary", {"spread": "none"})) == [["fedavg", "71.0"]]


def test_one_seed_has_a_value_alone() -> None:
    table = make({"fedavg": [0.7], "fedavgm": [0.8]}, "summary")
    assert texts(table) == [["fedavg", "70.0"], ["fedavgm", "80.0"]]
    assert "of one seed (0)" in words_of(table)
    assert "A single seed shows no spread." in words_of(table)


def test_methods_or_cases_are_the_rows() -> None:
    scores = {0.1: SCORES, 1.0: SCORES}
    wide, tall = make(scores, "summary"), make(scores, "summary", {"rows": "cases"})
    assert wide.head == ["Method", "alpha 0.1", "alpha 1"]
    assert tall.head == ["alpha", "fedavg", "fedavgm", "fedprox"]
    assert [row[1:] for row in texts(wide)] == [
        list(row) for row in zip(*(r[1:] for r in texts(tall)), strict=True)
    ]


def test_differences_are_paired_and_corrected_over_the_whole_table() -> None:
    scores = {0.1: SCORES, 1.0: {**SCORES, "fedavgm": [0.70, 0.73, 0.72, 0.76, 0.69]}}
    table = make(scores, "differences")
    p = [
        stats.ttest_rel(scores[alpha][method], AVG).pvalue
        for alpha in (0.1, 1.0)
        for method in ("fedavgm", "fedprox")
    ]
    order = sorted(p)
    adjusted = [max((4 - k) * order[k] for k in range(order.index(each) + 1)) for each in p]
    assert [float(row[-1]) for row in texts(table)] == pytest.approx([min(1, a) for a in adjusted], abs=5e-4)
    assert [row[-2] for row in texts(table)] == ["< 0.001", *(f"{each:.3f}" for each in p[1:])]
    assert "over the 4 comparisons of this table" in words_of(table)
    assert texts(table)[0][:5] == ["0.1", "fedavgm", "+5.00", "[+3.48, +6.52]", "5"]
    assert bold(table) == ["+5.00", texts(table)[0][-1]]


def test_the_same_p_is_bold_in_a_table_of_one_comparison_and_not_in_one_of_ten() -> None:
    slight = [0.72, 0.73, 0.74, 0.75, 0.72]
    p = stats.ttest_rel(slight, AVG).pvalue
    assert 0.005 < p < 0.05
    assert bold(make({"fedavg": AVG, "m0": slight}, "differences")) != []
    others = {f"m{k}": NOISE for k in range(1, 10)}
    table = make({"fedavg": AVG, "m0": slight, **others}, "differences")
    assert bold(table) == []
    assert "10 comparisons" in words_of(table)


def test_a_summary_is_bold_where_better_and_italic_where_worse() -> None:
    worse = [value - 0.05 for value in NOISE[:4]] + [0.6]
    table = make({"fedavg": AVG, "up": BETTER, "down": worse, "same": NOISE}, "summary")
    cells = {row[0].text: row[1] for row in table.rows}
    assert [cells[name].bold for name in cells] == [False, True, False, False]
    assert [cells[name].italic for name in cells] == [False, False, True, False]
    assert "Bold: better than fedavg in the same case, italic: worse" in words_of(table)


def test_of_a_loss_the_smaller_is_the_better() -> None:
    table = make({"fedavg": BETTER, "lower": AVG}, "summary", metric="test_loss")
    assert [cell.bold for cell in table.rows[1]] == [False, True]
    assert texts(table)[0][1] == "0.762 ± 0.016"


def test_fewer_than_five_seeds_have_no_bold_and_the_caption_says_so() -> None:
    table = make({"fedavg": [0.1, 0.11, 0.12, 0.1], "far": [0.9, 0.93, 0.91, 0.92]}, "differences")
    assert float(texts(table)[0][-2].strip("< ")) <= 0.001
    assert bold(table) == []
    assert "at least 5 seeds, so nothing is bold here" in words_of(table)


def test_tuning_on_one_seed_is_said_and_takes_the_bold_away() -> None:
    for kind in ("summary", "differences"):
        table = make(SCORES, kind, tuning={**TUNING, "seeds": [100]})
        assert bold(table) == []
        assert "of these settings, which were chosen on 10 % of the training data" in words_of(table)
        assert "Bold:" not in words_of(table)


def test_the_papers_label_stands_beside_its_number_alone() -> None:
    value = {"method": "fedavgm", "metric": "test_accuracy", "where": "table 1", "value": 0.8}
    document = {"source": "a report", "values": [value], "labels": {"fedavgm": "FedAvgM of the report"}}
    table = make(SCORES, "summary", document=document)
    assert [row[0].text for row in table.rows] == ["fedavg", "fedavgm", "fedprox"]
    assert [row[-1].text for row in table.rows] == ["–", "80.0 (FedAvgM of the report)", "–"]
    absent = {"source": "a report", "values": [{**value, "method": "gone"}], "labels": {"gone": "Another"}}
    last = make(SCORES, "summary", document=absent).rows[-1]
    assert (last[0].text, last[-1].text) == ("not run", "80.0 (Another)")
    some = make(SCORES, "summary", {"methods": ["fedavg"]}, document=document)
    assert [row[0].text for row in some.rows] == ["fedavg"]
    columns = make(SCORES, "summary", {"rows": "cases"}, document=document).head
    assert "Paper: FedAvgM of the report" in columns


def test_a_summary_without_comparison_has_no_bold_and_no_test() -> None:
    table = make(SCORES, "summary", {"compare": False})
    assert bold(table) == []
    assert "Bold" not in words_of(table)
    assert "fedavg " not in words_of(table)
    assert bold(make(SCORES, "summary")) != []


def test_seeds_that_chose_and_give_results_too_are_named() -> None:
    tuning = {**TUNING, "seeds": [0], "seeds_by_method": {"fedavg": [0]}, "own_seeds": False, "refit": False}
    one = make(SCORES, "differences", tuning=tuning)
    assert "on one seed (0), 12 runs" in words_of(one)
    assert "The results use seed 0, too." in words_of(one)
    assert bold(one) == []
    some = make(SCORES, "differences", tuning={**tuning, "seeds": [0, 1, 9], "seeds_by_method": {}})
    assert "The results use seeds 0, 1, too." in words_of(some)


def test_methods_with_a_single_point_are_not_counted_as_tuned() -> None:
    tuning = {**TUNING, "seeds_by_method": {name: [5] for name in SCORES}, "untuned": ["fedavg"]}
    assert "fedavg has a single point and no tuning." in words_of(make(SCORES, "summary", tuning=tuning))
    assert "of tuning for every other method in each case" in words_of(make(SCORES, "summary", tuning=tuning))
    none = make(SCORES, "differences", tuning={**tuning, "untuned": list(SCORES)})
    assert "Every method has a single point, so no settings were chosen." in words_of(none)
    assert "of tuning for" not in words_of(none)
    assert bold(none) != []


def test_tuning_on_several_seeds_is_said() -> None:
    own = words_of(make(SCORES, "differences", tuning=TUNING))
    assert (
        "by the mean over 2 seeds (100, 101) that the results do not use, 12 runs of tuning for every" in own
    )
    assert "So few seeds leave some luck" in own
    same = {**TUNING, "seeds": [0, 1, 2, 3, 4], "own_seeds": False}
    table = make(SCORES, "differences", tuning=same)
    assert "by the mean over 5 seeds (0 to 4), 12 runs" in words_of(table)
    assert "So few seeds" not in words_of(table)
    unequal = {**same, "seeds_by_method": {"fedavg": [0, 1, 2, 3, 4], "fedavgm": [0]}}
    one = make(SCORES, "differences", tuning=unequal)
    assert "on one seed for some methods" in words_of(one)
    assert bold(one) == []
    assert bold(table) != []


def test_a_cell_with_failed_runs_has_no_mean_and_no_test_and_a_note_says_why() -> None:
    scores = {**SCORES, "fedadam": [0.9, "the loss is not finite", 0.9, 0.9, "out of memory"]}
    for kind in ("summary", "differences"):
        table = make(scores, kind)
        row = next(row for row in texts(table) if row[0] == "fedadam")
        assert row[1] == "failed (2 of 5)"
        assert "No test: fedadam (2 of 5 runs failed)." in words_of(table)
        assert "the 2 comparisons" in words_of(table)
        assert table.notes[-1:] == [
            "fedadam: 2 of 5 runs failed: the loss is not finite (seed 1); out of memory (seed 4)."
        ]


def test_a_failed_baseline_leaves_nothing_to_compare() -> None:
    table = make({**SCORES, "fedavg": [0.7, 0.7, "broken", 0.7, 0.7]}, "differences")
    assert "fedavgm (1 of 5 runs of the baseline failed)" in words_of(table)
    assert bold(table) == []


def test_a_run_whose_loss_ended_without_a_value_has_diverged() -> None:
    results = results_of({"fedavg": [[0.7, 0.1], [0.7, 0.72]]})
    digest = next(iter(results.lines))
    line = results.lines[digest]
    curve = {**line.curve, "test_loss": [1.0, None]}
    results = Results(results.info, {**results.lines, digest: replace(line, curve=curve)})
    table = study_table(results, {"kind": "summary"})
    assert texts(table)[0][1] == "failed (1 of 2)"
    assert "test_loss is not finite in round 2 (seed 0)" in table.notes[-1]


def test_a_metric_that_no_run_has_is_no_failure_and_the_nearest_one_is_named() -> None:
    table = make(SCORES, "summary", {"metric": "test_acuracy"})
    assert texts(table)[0][1] == "no value (5 of 5)"
    why = "test_acuracy was not measured, did you mean 'test_accuracy' (seeds 0, 1, 2, 3, 4)."
    assert f"fedavg: 5 of 5 runs have no value: {why}" in table.notes


def test_a_paused_run_is_not_finished_and_has_not_failed() -> None:
    results = results_of({"fedavg": [0.7, 0.72]})
    digest = next(iter(results.lines))
    paused = replace(results.lines[digest], status="stopped", reason="paused after round 1")
    results = Results(results.info, {**results.lines, digest: paused})
    assert texts(study_table(results, {"kind": "summary"}))[0][1] == "unfinished (1 of 2)"


def test_a_study_that_still_runs_says_how_far_it_is() -> None:
    table = make({**SCORES, "fedprox": [0.7, None, 0.7, None, None]}, "differences")
    assert texts(table)[1][1] == "unfinished (2 of 5)"
    assert "fedprox (3 of 5 runs are not finished)" in words_of(table)


def tuned(values: dict[str, list[float]], chosen: dict[str, float]) -> Results:
    """Results whose first method was tuned over `values`."""
    results = results_of(
        {"fedadam": [0.7, 0.8], "fedavg": [0.6, 0.7]}, tuning=TUNING, grids={"fedadam": values}
    )
    entries = [
        replace(each, point=chosen) if each.method == "fedadam" else each for each in results.info.entries
    ]
    lines = dict(results.lines)
    example = next(iter(lines.values()))
    points = (
        [{name: value} for name, each in values.items() for value in each] if len(values) == 1 else [chosen]
    )
    for point in points:
        for seed in (100, 101):
            digest = f"t-{point}-{seed}"
            entries.append(Row.planned(digest, digest, "fedadam", {}, point, "tune", seed))
            curve = {"round": [1], "validation_accuracy": [0.5 if point == chosen else 0.4]}
            lines[digest] = replace(example, digest=digest, curve=curve)
    return Results(replace(results.info, entries=entries), lines)


def test_every_chosen_value_at_the_edge_has_a_star() -> None:
    edge = study_table(tuned({"local.lr": [0.01, 0.1, 1.0]}, {"local.lr": 1.0}), {"kind": "choices"})
    assert edge.head == ["Method", "local.lr", "Effective rate", "Validation accuracy (%)", "Runs of tuning"]
    assert texts(edge)[0] == ["fedadam", "1*", "–", "50.0", "6"]
    assert "* The value lies at the edge" in words_of(edge)
    inner = study_table(tuned({"local.lr": [0.01, 0.1, 1.0]}, {"local.lr": 0.1}), {"kind": "choices"})
    assert texts(inner)[0][1] == "0.1"
    two = study_table(tuned({"local.lr": [0.7, 0.9]}, {"local.lr": 0.7}), {"kind": "choices"})
    assert texts(two)[0][1] == "0.7*"


def test_a_metric_of_clients_was_tuned_as_it_is() -> None:
    results = tuned({"local.lr": [0.1, 1.0]}, {"local.lr": 1.0})
    column = "clients_accuracy_mean"
    lines = {
        digest: replace(line, curve={"round": [1], column: line.curve["validation_accuracy"]})
        if digest.startswith("t-")
        else line
        for digest, line in results.lines.items()
    }
    info = replace(results.info, metric=column)
    table = study_table(Results(info, lines), {"kind": "choices"})
    assert table.head[3] == "Mean accuracy of the clients (%)"
    assert texts(table)[0][3] == "50.0"


def test_results_of_settings_at_the_edge_have_a_star_in_the_other_tables() -> None:
    results = tuned({"local.lr": [0.01, 0.1]}, {"local.lr": 0.1})
    table = study_table(results, {"kind": "summary"})
    assert texts(table)[0][1].endswith("*")
    assert not texts(table)[1][1].endswith("*")
    assert "* A chosen setting lies at the edge" in words_of(table)


def test_default_tables_follow_from_the_study() -> None:
    info = results_of(SCORES, targets=[0.5], tuning=TUNING).info
    assert [spec["kind"] for spec in default_tables(info)] == ["summary", "differences", "choices", "targets"]
    plain = results_of({"fedavg": AVG}).info
    assert [spec["kind"] for spec in default_tables(plain)] == ["summary"]


def test_tables_of_one_kind_have_names_of_their_own() -> None:
    results = results_of(
        SCORES, tables=[{"kind": "summary"}, {"kind": "summary"}, {"kind": "summary", "name": "x"}]
    )
    assert [table.name for table in study_tables(results)] == ["summary", "summary-2", "x"]


def test_methods_and_cases_can_be_left_out() -> None:
    scores = {0.1: SCORES, 1.0: SCORES}
    table = make(
        scores, "differences", {"methods": ["fedavg", "fedprox"], "where": {"data.partition.alpha": 1.0}}
    )
    assert [row[:2] for row in texts(table)] == [["1", "fedprox"]]
    assert "one comparison, so no correction" in words_of(table)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "summery"}, "unknown kind of table 'summery' .tables.kind.; did you mean 'summary'"),
        ({}, "a table has no kind .tables.kind.; known: .*summary"),
        ({"kind": "summary", "spred": "none"}, "unknown setting 'spred' .tables.spred.; did you mean 'spread'"),
        ({"kind": "summary", "spread": "range"}, "'spread' is 'range', but must be 'interval', 'deviation' or 'none'"),
        ({"kind": "summary", "digits": "two"}, "'digits' is 'two', but must be a whole number"),
        ({"kind": "summary", "methods": ["fedavgn"]}, "no method 'fedavgn' .*did you mean 'fedavg"),
        ({"kind": "summary", "where": {"alpha": 1}}, "the cases have no dimension 'alpha'"),
        ({"kind": "differences", "baseline": "x"}, "the baseline 'x' is not among the methods"),
        ({"kind": "differences", "methods": ["fedavg"]}, "needs at least two methods"),
        ({"kind": "summary", "name": "../x"}, "'name' is '../x', but must be letters"),
        ({"kind": "summary", "digits": -1}, "'digits' is -1, but must be at least 0"),
        ({"kind": "choices"}, "the study tunes no settings"),
        ({"kind": "clients"}, "'clients' was removed .*tables.kind.*metric = 'clients_accuracy_mean'"),
        ({"kind": "differences", "simultaneous": True}, "'simultaneous' was removed .*; remove it: the adjusted p"),
        ({"kind": "summary", "interval": "bootstrap"}, "'interval' was removed .*tables.interval.*t intervals"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_is_refused_with_what_to_do(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_table(results_of(SCORES), spec)


def test_a_case_that_no_cell_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no case has these values .*cases: alpha 0.1"):
        make({0.1: SCORES}, "summary", {"where": {"data.partition.alpha": 7}})


def test_every_table_of_a_file_is_checked_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"tables\[1\].kind"):
        check_tables([{"kind": "summary"}, {"kind": "x"}])


def test_every_kind_says_in_its_docstring_what_it_shows() -> None:
    assert all((function.__doc__ or "").strip() for function in TABLES.values())
