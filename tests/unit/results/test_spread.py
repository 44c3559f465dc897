"""Runs that are measured at the clients: the spread over them, and runs that have no one model to test."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.cli.display.run_display import closing_lines, round_line
from fedlens.pages.compare import compare, write_comparison
from fedlens.pages.run_page import write_report
from fedlens.results.comparison import readable
from fedlens.results.run import read_run
from tests.unit.pages.reading import read_page
from tests.unit.results.fake_run import line, make_run

SPREAD = {
    "clients_accuracy_mean": 0.9,
    "clients_accuracy_mean_before": 0.8,
    "clients_accuracy_std": 0.05,
    "clients_accuracy_worst_decile": 0.61,
    "clients_loss_mean": 0.3,
}
OWN = {"test_loss": ..., "test_accuracy": ...}


def tuned(tmp_path: Path) -> Path:
    return make_run(tmp_path, name="tuned", metrics=[line(0), line(1, **SPREAD), line(2)])


def personal(tmp_path: Path) -> Path:
    rows = [line(k, validation_loss=1.0 / (k + 1), validation_accuracy=0.5 + k / 10, **OWN) for k in range(3)]
    best = {"round": 1, "metric": "validation_accuracy", "value": 0.6, "chosen_on": "validation"}
    return make_run(tmp_path, name="personal", metrics=rows, summary={"best": best, "final": rows[-1]})


def test_the_spread_is_that_of_the_last_round_that_has_one(tmp_path: Path) -> None:
    run = read_run(tuned(tmp_path))
    assert run.spread() == {
        "accuracy": {"mean": 0.9, "mean_before": 0.8, "std": 0.05, "worst_decile": 0.61},
        "loss": {"mean": 0.3},
    }
    assert run.split() == "test"


def test_without_a_test_the_clients_own_data_decide(tmp_path: Path) -> None:
    run = read_run(personal(tmp_path))
    assert run.split() == "validation"
    assert run.final("accuracy") == (2, 0.7)
    assert run.best("accuracy") == (1, 0.6, "validation")


def test_the_page_says_where_it_was_measured(tmp_path: Path) -> None:
    own = read_page(write_report(personal(tmp_path)).read_text(encoding="utf-8"))
    assert "70.0 % on all held-out images of the clients, after round 2" in own.words
    assert "Each client's model" not in own.words
    page = read_page(write_report(tuned(tmp_path)).read_text(encoding="utf-8"))
    assert "on test, after round 2" in page.words
    row = "accuracy 90.0 % 80.0 % 5.0 % 61.0 % loss 0.3"
    assert f"mean mean before tuning standard deviation worst tenth of the clients {row}" in page.words


def test_a_comparison_does_not_hold_what_was_measured_elsewhere_against_the_upper_bound(
    tmp_path: Path,
) -> None:
    bound = make_run(tmp_path, name="bound", algorithm="centralized", metrics=[line(0), line(1), line(2)])
    rows = compare([tuned(tmp_path), personal(tmp_path), bound])
    assert [row["measured_on"] for row in rows] == ["test", "validation", "test"]
    assert rows[0]["relative_accuracy"] is not None
    assert rows[1]["relative_accuracy"] is None
    assert [row["clients_worst_decile"] for row in rows] == [0.61, None, None]
    told = readable(rows)
    assert told[0]["worst tenth of clients"] == "61.0 %"
    assert [texts["measured on"] for texts in told] == ["test", "validation", "test"]
    assert "measured on" not in readable(rows[:1])[0]
    assert "mean of clients" not in readable(rows[1:])[0]
    page = read_page(
        write_comparison([tuned(tmp_path / "a"), personal(tmp_path / "a")], tmp_path / "c.html").read_text()
    )
    assert "Accuracy as measured" in page.words


def test_the_terminal_says_so_too() -> None:
    own = {"round": 3, "validation_accuracy": 0.8123, "validation_loss": 0.61}
    assert round_line(own, 80) == "round 3/80  accuracy 0.812  loss 0.61"
    both = own | {"test_accuracy": 0.7, "test_loss": 0.9}
    assert round_line(both, 80) == "round 3/80  accuracy 0.7  loss 0.9"
    final = own | {"clients_accuracy_worst_decile": 0.4}
    summary = {"status": "finished", "final": final, "totals": {}}
    assert closing_lines(summary)[0] == (
        "finished: accuracy 81.2 % on all held-out images of the clients after round 3, 40.0 % at the worst "
        "tenth of the clients"
    )


def test_the_worst_tenth_is_told_also_where_it_is_nothing() -> None:
    final = {"round": 1, "validation_accuracy": 0.7, "clients_accuracy_worst_decile": 0.0}
    assert closing_lines({"status": "finished", "final": final})[0].endswith(
        ", 0.0 % at the worst tenth of the clients"
    )


def test_of_a_tuned_run_the_clients_are_told_first_and_which_model_is_which() -> None:
    final = {"round": 3, "test_accuracy": 0.436, "validation_accuracy": 0.447, **SPREAD}
    best = {"round": 2, "metric": "validation_accuracy", "value": 0.447, "chosen_on": "validation"}
    summary = {"status": "finished", "final": final, "best": {**best, "test_value": 0.43}}
    assert closing_lines(summary)[:2] == [
        "finished: the clients' mean accuracy on held-out images 90.0 %, each after tuning, in round 3, "
        "61.0 % at the worst tenth of the clients",
        "global model, not tuned: accuracy 43.6 % on test after round 3; best 43.0 % on test in round 2, chosen on "
        "validation",
    ]


@pytest.mark.parametrize(
    ("best", "said"),
    [
        (
            {"metric": "test_accuracy", "value": 0.8, "chosen_on": "test"},
            "best 80.0 % in round 2, chosen on test",
        ),
        (
            {"metric": "validation_accuracy", "value": 0.8, "chosen_on": "validation", "test_value": 0.7},
            "best 70.0 % on test in round 2, chosen on validation",
        ),
        (
            {"metric": "validation_accuracy", "value": 0.8, "chosen_on": "validation"},
            "best 80.0 % on validation in round 2, chosen on validation",
        ),
    ],
)
def test_the_best_value_is_one_of_test_where_it_is_known(best: dict, said: str) -> None:
    final = {"round": 3, "test_accuracy": 0.5, "validation_accuracy": 0.6}
    line = closing_lines({"status": "finished", "final": final, "best": {"round": 2, **best}})[0]
    assert line == f"finished: accuracy 50.0 % on test after round 3; {said}"


def test_the_page_of_a_tuned_run_begins_with_what_the_clients_use(tmp_path: Path) -> None:
    words = read_page(write_report(tuned(tmp_path)).read_text(encoding="utf-8")).words
    assert "Accuracy after tuning 90.0 % mean of the clients; 80.0 % before" in words


@pytest.mark.parametrize("name", ["clients_accuracy", "client_accuracy_mean", "clients_accuracy_median"])
def test_other_names_are_no_spread(name: str, tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path, metrics=[line(0, **{name: 0.5})])).spread() == {}
