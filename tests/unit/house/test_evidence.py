"""The page of evidence says what its results say, and its studies are what can be run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import store, tables
from benchmarks.evidence.cells import Cell, curve, overlaid
from benchmarks.evidence.curves import CURVES, Curve
from benchmarks.evidence.page import LINE, PAGE, TABLE, rendered
from benchmarks.evidence.statistics import at_batches, at_edge, at_round, final, rounds_to, sign, spread
from benchmarks.evidence.studies import (
    STUDIES,
    TUNING_SEED,
    Method,
    Study,
    chosen,
    final_cells,
    points,
    tuning_cells,
)
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.experiment.build import build
from fedlens.experiment.config import read_config
from fedlens.experiment.config_source import Source
from fedlens.experiment.plan import plan

ALL = tables.ordered()
CURVE = [(0, 0, 0.1), (2, 9, 0.5), (4, 30, 0.7), (6, 31, 0.6)]
SMALL = Study(
    "small",
    "small",
    {"one": {"data.partition.name": "iid"}, "two": {"data.partition.name": "shards"}},
    (
        Method("base", {"algorithm.name": "fedavg"}, {"local.lr": (0.1, 0.2, 0.3)}),
        Method("other", {"algorithm.name": "fedprox"}, {"local.lr": (0.1, 0.2), "algorithm.mu": (1.0, 3.0)}),
    ),
    "base",
)


def results(study: Study, **values: float) -> dict[str, store.Line]:
    """Lines of a study, flat curves: tuning likes the largest learning rate, the seeds differ by 0.01."""
    there: dict[str, store.Line] = {}

    def put(cell: Cell, value: float) -> None:
        there[cell.digest] = {
            "digest": cell.digest,
            "cpu_seconds": 2.0,
            "curve": [(0, 0, 0.1), *((20 * k, 240 * k, value) for k in range(1, 6))],
        }

    for cell in tuning_cells(study):
        put(cell, cell.settings["local"]["lr"])
    for cell in final_cells(study, there):
        put(cell, values[cell.method] + 0.01 * cell.seed)
    return there


# ---- the page


def test_the_page_says_what_the_results_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page, store.read(store.HOME)), "run: python -m benchmarks.evidence --render"


def test_every_study_has_its_accuracy_its_choices_and_its_cost_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = {match[2] for match in TABLE.finditer(page)} | {match[2] for match in LINE.finditer(page)}
    tuned = [study for study in ALL if list(tuning_cells(study))]
    assert shown >= {f"{study.name}.cost" for study in ALL} | {f"{study.name}.choices" for study in tuned}
    assert all(shown & {f"{study.name}.accuracy", f"{study.name}.budgets"} for study in ALL)


def test_no_run_of_a_study_is_missing_and_none_is_left_over() -> None:
    there = store.read(store.HOME)
    cells = [cell for study in ALL for cell in [*tuning_cells(study), *final_cells(study, there)]]
    assert {cell.digest for cell in cells} == set(there)
    assert {cell.seed for cell in cells if cell.role == "final"} == {0, 1, 2}


def test_every_figure_is_there_with_the_command_that_made_it() -> None:
    index = json.loads((store.HOME / "index.json").read_text(encoding="utf-8"))["curves"]
    assert set(index) == {each.name for each in CURVES}
    for name, entry in index.items():
        assert ET.parse(store.HOME / "curves" / f"{name}.svg").getroot().tag.endswith("svg")
        assert entry["command"].rpartition(" ")[2] in STUDIES
        assert entry["seeds"] == [0, 1, 2]
        assert entry["cpu_seconds"] > 0


def test_figures_are_named_after_algorithms() -> None:
    assert {each.name for each in CURVES} <= set(ALGORITHMS)


def test_a_caption_names_everyone_in_the_figure() -> None:
    assert Curve("fedprox", SMALL, ("other",)).caption.startswith(
        "Test accuracy of other and base on 10,000 "
    )
    assert Curve("fedavg", SMALL, ()).caption.startswith("Test accuracy of base on 10,000 ")


def test_markers_are_filled_in_and_the_rest_stays() -> None:
    page = "a\n<!-- table: hsu2019.choices -->\n| old |\n\nb\n<!-- line: total -->\nold\n\nc\n"
    made = rendered(page, {})
    assert made.startswith("a\n<!-- table: hsu2019.choices -->\n|  | alpha = 100 |")
    assert "old" not in made
    assert made.endswith(
        "\nb\n<!-- line: total -->\nAll 0 runs of this page together took 0 CPU minutes.\n\nc\n"
    )
    assert rendered(made, {}) == made
    with pytest.raises(KeyError):
        rendered("<!-- line: hsu2019.price -->\n", {})


# ---- the studies


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_every_configuration_of_a_study_can_be_planned(study: Study) -> None:
    there = {cell.digest: {"curve": [(0, 0, 0.1)]} for cell in tuning_cells(study)}
    cells = [*tuning_cells(study), *final_cells(study, there)]
    assert cells
    for cell in cells:
        plan(read_config(cell.settings), Source(dict(cell.settings)))


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_every_method_of_a_study_can_be_built(study: Study, tmp_path: Path) -> None:
    there = {cell.digest: {"curve": [(0, 0, 0.1)]} for cell in tuning_cells(study)}
    small = {"name": "synthetic", "train": 1000, "test": 10}
    for cell in final_cells(study, there):
        if cell.seed == 0:
            settings = overlaid(cell.settings, {"data.dataset": small})
            built = build(plan(read_config(settings), Source(settings)), tmp_path, download=False)
            assert built.config.rounds == cell.settings["rounds"]
            assert built.clients_per_round == cell.settings["select"]["clients_per_round"]


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_everyone_has_as_many_runs_to_choose_from(study: Study) -> None:
    assert len({len(points(method)) for method in study.methods}) == 1
    if study.methods[0].grid:
        assert len({tuple(method.grid["local.lr"]) for method in study.methods}) == 1


@pytest.mark.parametrize("study", ALL, ids=lambda study: study.name)
def test_tuning_sees_neither_the_test_images_nor_the_seeds_of_the_results(study: Study) -> None:
    for cell in tuning_cells(study):
        assert cell.role == "tune"
        assert cell.seed == TUNING_SEED
        assert cell.settings["data"]["validation"] == 0.1
    there = {cell.digest: {"curve": [(0, 0, 0.1)]} for cell in tuning_cells(study)}
    assert all("validation" not in cell.settings["data"] for cell in final_cells(study, there))
    assert TUNING_SEED not in {cell.seed for cell in final_cells(study, there)}


def test_studies_share_the_runs_that_they_have_in_common() -> None:
    hsu2019, fedir = (
        {cell.digest for cell in tuning_cells(study) if cell.method == "FedAvg"}
        for study in ALL
        if study.name in ("hsu2019", "fedir")
    )
    assert fedir < hsu2019


def test_the_digest_is_of_the_settings_alone() -> None:
    one = Cell("a", "b", "tune", {"seed": 1, "local": {"lr": 0.1, "epochs": 2}})
    assert one.digest == Cell("c", "d", "final", {"local": {"epochs": 2, "lr": 0.1}, "seed": 1}).digest
    assert one.digest != Cell("a", "b", "tune", {"seed": 2, "local": {"lr": 0.1, "epochs": 2}}).digest


def test_settings_on_top_leave_the_others_as_they_were() -> None:
    base: dict[str, Any] = {"local": {"lr": 0.1}}
    assert overlaid(base, {"local.lr": 0.2, "data.partition.name": "iid"}) == {
        "local": {"lr": 0.2},
        "data": {"partition": {"name": "iid"}},
    }
    assert base == {"local": {"lr": 0.1}}


def test_the_best_point_is_chosen_the_first_of_equals_and_none_while_runs_are_missing() -> None:
    base, other = SMALL.methods
    assert chosen(SMALL, "one", base, {}) is None
    there = results(SMALL, base=0.5, other=0.6)
    assert chosen(SMALL, "one", base, there) == {"local.lr": 0.3}
    assert chosen(SMALL, "one", other, there) == {"local.lr": 0.2, "algorithm.mu": 1.0}


def test_a_run_that_diverged_is_not_chosen() -> None:
    there = results(SMALL, base=0.5, other=0.6)
    best = [cell for cell in tuning_cells(SMALL) if cell.method == "base"][2]
    there[best.digest] = {**there[best.digest], "failed": "the loss is not a number"}
    assert chosen(SMALL, "one", SMALL.methods[0], there) == {"local.lr": 0.2}


# ---- the statistics


def test_batches_are_summed_over_rounds_and_only_measured_rounds_are_points() -> None:
    lines: list[dict[str, Any]] = [
        {"round": 0, "batches_max": 0, "test_accuracy": 0.1},
        {"round": 1, "batches_max": 4},
        {"round": 2, "batches_max": 5, "test_accuracy": 0.50004},
    ]
    assert curve(lines, "test_accuracy") == [(0, 0, 0.1), (2, 9, 0.5)]
    assert curve(lines, "validation_accuracy") == []


def test_the_final_accuracy_is_the_mean_of_the_last_five_measured() -> None:
    assert (
        final([(0, 0, 0.9), *((k, k, value) for k, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.6], 1))]) == 0.32
    )


def test_budgets_are_kept_to() -> None:
    assert [at_batches(CURVE, budget) for budget in (8, 9, 30, 31)] == [0.1, 0.5, 0.7, 0.6]
    assert [at_round(CURVE, budget) for budget in (3, 4, 6)] == [0.5, 0.7, 0.6]
    assert at_batches(CURVE, 32) is None
    assert at_round(CURVE, 7) is None


def test_rounds_to_a_target_are_the_first() -> None:
    assert [rounds_to(CURVE, target) for target in (0.5, 0.55, 0.7, 0.71)] == [2, 4, 4, None]


def test_mean_least_and_largest() -> None:
    assert spread([0.5, 0.75, 0.25]) == (0.5, 0.25, 0.75)


def test_a_sign_is_told_only_where_all_seeds_agree() -> None:
    told = {(1.0, 2.0): 1, (-1.0, -2.0): -1, (1.0, -1.0): 0, (1.0, 0.0): 0, (-1.0, 0.0): 0}
    assert {differences: sign(differences) for differences in told} == told


def test_an_edge_needs_something_between() -> None:
    assert [at_edge(value, (1, 2, 3)) for value in (1, 2, 3)] == [True, False, True]
    assert not at_edge(1, (1, 2))


# ---- the tables


def test_the_tables_of_made_up_results() -> None:
    there = results(SMALL, base=0.5, other=0.6)
    assert tables.accuracy(SMALL, there) == [
        "|  | one | two |",
        "| --- | --- | --- |",
        "| base | 0.510 (0.500 to 0.520) | 0.510 (0.500 to 0.520) |",
        "| other | 0.610 (0.600 to 0.620) | 0.610 (0.600 to 0.620) |",
    ]
    assert tables.differences(SMALL, there)[2:] == [
        "| other - base | **+10.00 (+10.00 to +10.00)** | **+10.00 (+10.00 to +10.00)** |"
    ]
    assert tables.rounds(SMALL, there)[3] == "| other | never, never, never | never, never, never |"
    assert tables.choices(SMALL, there)[2:] == [
        "| base | lr 0.3\\* | lr 0.3\\* |",
        "| other | lr 0.2, mu 1 | lr 0.2, mu 1 |",
    ]
    assert tables.budgets(SMALL, there)[2:4] == [
        "| one | base | 0.510 | 0.510 | 0.510 | 0.510 | 0.510 |",
        "| one | other | **0.610** | **0.610** | **0.610** | **0.610** | **0.610** |",
    ]
    assert tables.cost(SMALL, there) == (
        "`python -m benchmarks.evidence small`; seeds 0, 1, 2, tuned on seed 100; 26 runs, 52 CPU seconds."
    )


def test_what_differs_by_seed_in_sign_is_not_bold() -> None:
    there = results(SMALL, base=0.5, other=0.6)
    worse = next(cell for cell in final_cells(SMALL, there) if cell.method == "other" and cell.seed == 1)
    there[worse.digest] = {**there[worse.digest], "curve": [(0, 0, 0.1)]}
    row = tables.differences(SMALL, there)[2]
    assert row == "| other - base | -7.00 (-41.00 to +10.00) | **+10.00 (+10.00 to +10.00)** |"


def test_divergence_and_missing_runs_are_said() -> None:
    there = results(SMALL, base=0.5, other=0.6)
    cell = next(cell for cell in final_cells(SMALL, there) if cell.method == "other" and cell.seed == 1)
    there[cell.digest] = {**there[cell.digest], "failed": "the loss is not a number"}
    assert tables.accuracy(SMALL, there)[3].startswith("| other | diverged (1 of 3) | 0.610 ")
    assert tables.differences(SMALL, there)[2].startswith("| other - base | diverged | ")
    assert tables.budgets(SMALL, there)[3].startswith("| one | other | diverged | ")
    del there[cell.digest]
    assert tables.accuracy(SMALL, there)[3].startswith("| other | not run | 0.610 ")
    assert tables.differences(SMALL, there)[2].startswith("| other - base | not run | ")


def test_a_method_is_set_beside_the_one_it_names() -> None:
    third = Method("third", {"algorithm.name": "fedavgm"}, {"local.lr": (0.1, 0.2)}, beside="other")
    study = replace(SMALL, methods=(*SMALL.methods, third))
    there = results(study, base=0.5, other=0.6, third=0.55)
    assert [row.split("|")[1:3] for row in tables.differences(study, there)[2:]] == [
        [" other - base ", " **+10.00 (+10.00 to +10.00)** "],
        [" third - other ", " **-5.00 (-5.00 to -5.00)** "],
    ]
    assert tables.budgets(study, there)[4] == "| one | third | 0.560 | 0.560 | 0.560 | 0.560 | 0.560 |"


def test_a_budget_that_a_run_does_not_come_to_is_not_reached() -> None:
    there = results(SMALL, base=0.5, other=0.6)
    cell = next(cell for cell in final_cells(SMALL, there) if cell.method == "other")
    there[cell.digest] = {**there[cell.digest], "curve": there[cell.digest]["curve"][:-1]}
    row = tables.budgets(SMALL, there)[3]
    assert row == "| one | other | **0.610** | not reached | **0.610** | **0.610** | not reached |"


# ---- the store


def test_a_line_that_was_cut_off_is_not_there_and_the_next_one_stands_by_itself(tmp_path: Path) -> None:
    store.append(tmp_path, "s", {"digest": "a", "curve": []})
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"digest": "b", "cur')
    assert set(store.read(tmp_path)) == {"a"}
    store.append(tmp_path, "s", {"digest": "c", "curve": []})
    assert set(store.read(tmp_path)) == {"a", "c"}


def test_what_is_forgotten_is_run_again_and_nothing_else(tmp_path: Path) -> None:
    for digest, file in (("a", "s"), ("b", "s"), ("c", "t")):
        store.append(tmp_path, file, {"digest": digest})
    assert store.forget(tmp_path, ["a", "c", "x"]) == 2
    assert set(store.read(tmp_path)) == {"b"}
