"""What federation costs: differences, intervals, verdicts and the sentences, from runs with known numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedlens.report.cost_answer import UNSURE, cost_answer, difference
from fedlens.report.cost_page import CLIENTS_SHOWN, write_cost_page
from tests.unit.report.fake_run import class_counts, line, make_run
from tests.unit.report.reading import Page, assert_self_contained, read_page

HELD_OUT = 100
WORK = {"rounds": 2, "clients": 3, "cohort": 2, "images": 90, "passes": 4.0, "batch": 10, "steps": 18}
# By role and client, the accuracy with each seed.
AT_CLIENTS = {
    "federated": {"mercy": (0.5, 0.52, 0.54), "oak": (0.9, 0.91, 0.92), "<b>": (0.8, 0.7, 0.9)},
    "centralized": {"mercy": (0.8, 0.83, 0.83), "oak": (0.9, 0.9, 0.93), "<b>": (0.9, 0.9, 0.9)},
    "local-only": {"mercy": (0.7, 0.73, 0.72), "oak": (0.6, 0.62, 0.61), "<b>": (0.75, 0.75, 0.75)},
}
TEST = {"federated": (0.90, 0.91, 0.92), "iid": (0.95, 0.95, 0.96), "centralized": (0.97, 0.97, 0.97)}


def study(
    directory: Path, seeds: int = 3, clients: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A cost directory with finished runs, and what was planned; `changes` are summaries of runs by their names."""
    clients = AT_CLIENTS if clients is None else clients
    rows = []
    for seed in range(seeds):
        for role in ("federated", "iid", "centralized", "local-only"):
            name = f"{role}-seed{seed}"
            rows.append({"name": name, "role": role, "seed": seed, "error": None})
            accuracy = (
                {"test_accuracy": TEST[role][seed]}
                if role in TEST
                else {"test_accuracy": ..., "test_loss": ...}
            )
            if role == "local-only":
                accuracy |= {"validation_accuracy": 0.7}
            metrics = [line(0, **accuracy), line(1, **accuracy), line(2, **accuracy)]
            path = make_run(
                directory, name="x", run_id=name, algorithm=role, metrics=metrics, counts=class_counts(3)
            )
            path.rename(directory / name)
            measured = [
                {
                    "round": 2, "client": client, "validation_examples": HELD_OUT,
                    "validation_loss": 1.0, "validation_accuracy": values[seed],
                }
                for client, values in clients.get(role, {}).items()
            ]  # fmt: skip
            (directory / name / "clients.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in measured)
            )
            if name in changes:
                (directory / name / "summary.json").write_text(json.dumps(changes[name]))
    return {"name": "scans", "seeds": list(range(seeds)), "work": WORK, "notes": ["A note."], "runs": rows}


def page_of(directory: Path, answer: dict[str, Any]) -> Page:
    html = write_cost_page(directory, answer).read_text("utf-8")
    assert_self_contained(re.sub(r'<a href="[\w-]+/report.html">', "<a>", html))  # links to its own runs
    return read_page(html)


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    first, second = {0: 0.9, 1: 0.85, 2: 0.95, 7: 0.1}, {0: 0.8, 1: 0.84, 2: 0.91, 9: 0.2}
    found = difference(first, second)
    assert found is not None
    values = np.array([0.1, 0.01, 0.04])
    low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high))
    assert found.seeds == 3
    assert found.sign == 0


def test_one_seed_has_no_interval_and_no_seed_no_difference() -> None:
    found = difference({0: 0.9}, {0: 0.8})
    assert found is not None
    assert (found.low, found.high, found.sign) == (None, None, None)
    assert difference({0: 0.9}, {1: 0.8}) is None


def test_an_interval_is_at_least_one_image_wide_and_within_what_is_possible() -> None:
    found = difference({0: 0.9, 1: 0.9}, {0: 0.8, 1: 0.8}, resolution=0.2)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((-0.1, 0.3))
    wide = difference({0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.5}, most=1.0)
    assert wide is not None
    assert (wide.low, wide.high) == (-1.0, 1.0)


def test_the_overall_differences_and_values(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    assert answer["overall"]["federated"]["test"] == pytest.approx({"mean": 0.91, "std": 0.01, "n": 3})
    assert answer["differences"]["partition"]["mean"] == pytest.approx(-0.13 / 3)
    assert answer["differences"]["partition"]["sign"] == -1
    assert answer["differences"]["federation"]["mean"] == pytest.approx(-0.06)
    joining = np.mean(
        [
            np.subtract(AT_CLIENTS["federated"][c], AT_CLIENTS["local-only"][c])
            for c in ("mercy", "oak", "<b>")
        ]
    )
    assert answer["differences"]["joining"]["mean"] == pytest.approx(joining)


def test_clients_are_named_the_worst_first_with_who_gains_and_who_loses(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    rows = answer["clients"]
    assert [row["client"] for row in rows] == ["mercy", "<b>", "oak"]
    assert [row["verdict"] for row in rows] == ["loses", UNSURE, "gains"]
    assert rows[0]["vs_centralized"]["mean"] == pytest.approx(-0.3)
    assert rows[0]["held_out"] == HELD_OUT


def test_it_answers_in_words(tmp_path: Path) -> None:
    said = cost_answer(tmp_path, study(tmp_path))["sentences"]
    assert said[0].startswith(
        "The partition costs 4.3 points of accuracy (95 % interval 2.9 to 5.8, 3 seeds): "
    )
    assert said[0].endswith("91.0 % instead of 95.3 % with IID clients and 97.0 % centralized.")
    assert said[2] == (
        "mercy does worst: 52.0 % on its 100 held-out images (82.0 % with the centralized model, 71.7 % with a model "
        "of its own)."
    )
    assert said[3] == "Of 3 clients, 1 gain by joining, 1 lose, and 1 show no clear difference."


def test_one_seed_says_that_it_is_one(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path, seeds=1))
    assert answer["sentences"][0].startswith(
        "The partition costs 5.0 points of accuracy (1 seed): 90.0 % instead"
    )
    assert "one seed" in answer["sentences"][3]
    assert {row["verdict"] for row in answer["clients"]} == {None}
    assert "there is no interval" in page_of(tmp_path, answer).words


def with_twin(tmp_path: Path, *values: float) -> str:
    """The first sentence with these values of the IID twin."""
    about = study(tmp_path)
    for seed, value in enumerate(values):
        path = tmp_path / f"iid-seed{seed}" / "metrics.jsonl"
        path.write_text("".join(json.dumps(line(k, test_accuracy=value)) + "\n" for k in range(3)))
    return str(cost_answer(tmp_path, about)["sentences"][0])


def test_a_gain_is_called_a_gain(tmp_path: Path) -> None:
    said = with_twin(tmp_path, 0.8, 0.81, 0.82)
    assert said.startswith(
        "The partition gains 10.0 points of accuracy (95 % interval 10.0 to 10.0, 3 seeds): 91.0 %"
    )


def test_a_difference_around_zero_is_uncertain(tmp_path: Path) -> None:
    said = with_twin(tmp_path, 0.85, 0.86, 0.99)
    assert said.startswith(
        "The partition has no clear cost: -1.0 points of accuracy (95 % interval -18.2 to 16.2, 3 seeds): 91.0 %"
    )


def test_unfinished_runs_are_rows_and_take_no_part(tmp_path: Path) -> None:
    about = study(tmp_path, **{"iid-seed1": {"status": "interrupted"}})
    about["runs"][2]["error"] = "out of memory"  # centralized-seed0
    answer = cost_answer(tmp_path, about)
    assert answer["differences"]["partition"]["seeds"] == 2
    assert answer["differences"]["federation"]["seeds"] == 2
    assert [answer["runs"][k]["status"] for k in (2, 5)] == ["failed", "interrupted"]
    page = page_of(tmp_path, answer)
    assert "2 runs of 12 did not finish" in page.words
    assert "centralized-seed0: out of memory" in page.words


def test_nothing_finished_is_an_answer_without_numbers(tmp_path: Path) -> None:
    about = study(tmp_path, seeds=1, clients={})
    for row in about["runs"]:
        row["error"] = "no"
    answer = cost_answer(tmp_path, about)
    assert answer["sentences"] == []
    assert "4 runs of 4 did not finish" in page_of(tmp_path, answer).words


def test_the_page_has_three_curves_on_one_axis_with_bands_and_every_client(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    page = page_of(tmp_path, answer)
    traces = page.figures[0]["data"]
    lines = [trace["name"] for trace in traces if "fill" not in trace]
    assert lines == ["federated", "IID clients", "centralized"]
    assert [trace["legendgroup"] for trace in traces if "fill" in trace] == lines
    assert "federated - IID clients -4.3 -5.8 to -2.9 lower" in page.words
    assert "mercy" in page.words
    assert "<b>" in page.words
    assert "b" not in page.tags[page.tags.index("table") :], "a client's name is not markup"
    assert "centralized-seed2/report.html" in page.loads


def test_many_clients_fill_no_endless_table(tmp_path: Path) -> None:
    clients = {role: {f"c{k}": (0.5, 0.6, 0.7) for k in range(CLIENTS_SHOWN + 5)} for role in AT_CLIENTS}
    page = page_of(tmp_path, cost_answer(tmp_path, study(tmp_path, clients=clients)))
    assert "And 5 clients more in cost.json." in page.words
