"""Every study that `fedlens reproduce` offers can be planned at every scale, and its document's numbers fit it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.data.catalogue import CATALOGUE
from fedlens.results.figures.study_figures import check_figures
from fedlens.results.rows import DATA_FIGURES, needs_data
from fedlens.results.stated import stated_values
from fedlens.results.tables import check_tables
from fedlens.settings.config import read_config
from fedlens.studies.estimate import estimate
from fedlens.studies.reproduce import absent_data, costs, records, study_scales
from fedlens.studies.reproductions import FOLDER, left_out, reproduction, reproductions, stated_document
from fedlens.studies.scale_differences import dotted, spellings
from fedlens.studies.study_file import read_study
from fedlens.studies.study_plan import StudyPlan
from tools.reproduce_table import PAGE, rendered, study_cost

NAMES = sorted(reproductions())
PAPER = ["hsu2020/table5", "ghaemi2022/algorithms"]  # the others have up to tens of thousands of runs
SCALES = [(name, scale) for name in NAMES for scale in study_scales(name)]
# Every fourth study at one scale, and all scales in turn.
IN_CI = [
    (name, [s for s in study_scales(name) if s != "paper"][k % 3 - 1]) for k, name in enumerate(NAMES[::4])
]
IN_CI += [(name, "paper") for name in PAPER]
DOCUMENTS = [name for name in NAMES if (FOLDER / f"{name}.document.toml").exists()]
OTHER_ROWS = {"centralized", "chance"}  # what a document states of methods that a study does not run


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_it_is_and_has_its_scales(name: str) -> None:
    first, second, *_ = reproduction(name).read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    assert first.endswith(".")
    assert second == "#", "the first comment line is the whole description"
    assert {"smoke", "laptop", "paper"} <= {*study_scales(name)}


def has_right_settings(plan: StudyPlan, name: str) -> None:
    """The runs are at the cost and on the data that costs.json states."""
    stated_cost = costs()[name][plan.scale]
    assert study_cost(plan) == stated_cost, "run 'python -m tools.reproduce_table NAME'"
    cells = [(method, case) for method in plan.cells.methods for case in plan.cells.cases]
    configs = [plan.cells.made(m, c, plan.cells.points(m)[0], "final").config for m, c in cells]
    names = {config.data.dataset["name"] for config in configs}
    names |= {read_config(dict(run.settings)).data.dataset["name"] for run in plan.pretraining}
    assert names <= set(CATALOGUE)
    info = plan.info({})
    assert info.title
    needed = names if needs_data(info.figures, info.tables) else set()
    assert set(stated_cost.datasets) == needed
    check_figures(replace(info, figures=[spec for spec in info.figures if spec["kind"] not in DATA_FIGURES]))
    check_tables(info.tables)
    assert info.command == f"fedlens reproduce {name} --scale {plan.scale}"
    if plan.paper is not None:
        says_what_stands_in(plan, {config.data.dataset["name"] for config in configs})


def says_what_stands_in(plan: StudyPlan, datasets: set[str]) -> None:
    """Every caption names each dataset that the scale paper does not have."""
    assert plan.paper is not None
    pairs = [(method, case) for method in plan.paper.methods for case in plan.paper.cases]
    papers = {dotted(plan.paper.given(*pair))["data.dataset.name"] for pair in pairs}
    words = " ".join(plan.caveats)
    for dataset in datasets - papers:
        assert spellings()["datasets"][dataset][0] in words.partition("Stand-ins:")[2]


@pytest.mark.parametrize(("name", "scale"), IN_CI)
def test_every_run_has_right_settings(name: str, scale: str) -> None:
    has_right_settings(StudyPlan.load(reproduction(name), scale), name)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "scale"), sorted({*SCALES} - {*IN_CI}))
def test_every_run_has_right_settings_at_the_other_scales(name: str, scale: str) -> None:
    has_right_settings(StudyPlan.load(reproduction(name), scale), name)


def test_a_figure_without_a_study_has_a_reason() -> None:
    for name, reason in left_out().items():
        assert name not in NAMES
        with pytest.raises(ConfigError, match="has no study") as error:
            reproduction(name)
        assert reason in str(error.value)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_numbers_of_a_document_belong_to_cells_of_its_study(name: str) -> None:
    plan = StudyPlan.load(reproduction(name), "paper", check=False)
    document = stated_document(plan.source)
    assert document["source"]
    assert document["values"] or document["claims"]
    methods = {method.name for method in plan.cells.methods} | OTHER_ROWS
    for value in stated_values(document):
        assert value.method in methods, value
        assert value.where
        assert any(value.holds_for(case.values) for case in plan.cells.cases), value
        if value.metric.endswith("accuracy") and not {"target", "relative_target"} & value.at.keys():
            assert 0 < value.number < 1


def test_a_file_of_numbers_belongs_to_a_study() -> None:
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.document.toml")}
    named = set()
    for name in NAMES:
        study = read_study(reproduction(name)).settings
        documents = [spec.get("document") for spec in (*study.tables, *study.figures)]
        named |= {f"{name.partition('/')[0]}/{file}" for file in documents if isinstance(file, str)}
    assert files == named


def test_every_study_has_its_costs() -> None:
    assert {name: list(scales) for name, scales in costs().items()} == {
        name: study_scales(name) for name in NAMES
    }


def test_the_scale_minutes_takes_at_most_ten() -> None:
    recorded = {
        name: run.cpu_hours for name, runs in records().items() for run in runs if run.scale == "minutes"
    }
    assert recorded
    assert {name: hours for name, hours in recorded.items() if hours > 10 / 60} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if costs()[name]["minutes"].runs])
def test_the_scale_minutes_takes_at_most_ten_by_timed_steps(
    name: str, real_data: Path, tmp_path: Path
) -> None:
    """With half as much again for an estimate on a busy machine."""
    if absent_data(costs()[name]["minutes"].datasets, real_data):
        pytest.skip("its data are not on this machine")
    found = estimate(StudyPlan.load(reproduction(name), "minutes"), tmp_path, jobs=1, data_dir=real_data)
    assert found.core_hours is not None
    assert found.core_hours + (found.pretraining["core_hours"] or 0) <= 1.5 * 10 / 60


def test_records_name_studies_and_scales() -> None:
    for name, runs in records().items():
        assert name in NAMES
        assert all(run.scale in study_scales(name) and run.outcome.endswith(".") for run in runs)


def test_the_table_of_the_page_is_the_list() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page, "run 'python -m tools.reproduce_table'"


def test_hsu2019_figure_5_has_the_settings_of_the_document() -> None:
    plan = StudyPlan.load(reproduction("hsu2019/fig5"), "paper", check=False)
    fedavgm = plan.cells.method("fedavgm")
    config = plan.cells.made(fedavgm, plan.cells.cases[0], plan.cells.points(fedavgm)[-1], "final").config
    assert (config.rounds, config.local.batch_size, config.local.weight_decay) == (10_000, 64, 0.004)
    assert config.algorithm == {"name": "fedavgm", "lr": 1.0, "momentum": 0.997, "nesterov": True}
    assert config.local.lr == 0.3
    assert len(plan.cells.points(fedavgm)) == len(plan.cells.points(plan.cells.method("fedavg"))) == 40
    assert {case.values["select.fraction"] for case in plan.cells.cases} == {0.05, 0.1, 0.2, 0.4}


def test_fedcvs_figures_show_the_rows_of_its_tables_with_the_same_settings() -> None:
    """Data, network, alpha, optimizer, rate, schedule and weights of a run say which row of tables 11 to 15 it is."""
    rows: dict[tuple[Any, ...], float] = {}
    for table in range(11, 16):
        rows |= dict(stated_by_settings(f"fedcv/table{table}"))
    assert len(rows) == 39 + 23 + 20 + 19 + 10
    for name in ("fedcv/fig4", "fedcv/fig5", "fedcv/fig14", "fedcv/fig15", "fedcv/table2"):
        shown = stated_by_settings(name)
        assert len(shown) >= 6
        for settings, number in shown:
            assert rows[settings] == number, (name, settings)


def stated_by_settings(name: str) -> list[tuple[tuple[Any, ...], float]]:
    """The document's accuracies of a study at its own scale, with the settings of the runs that they belong to."""
    plan = StudyPlan.load(reproduction(name), "paper", check=False)
    found = []
    for value in stated_values(stated_document(plan.source)):
        method = plan.cells.method(value.method)
        [case] = [case for case in plan.cells.cases if value.holds_for(case.values)]
        config = plan.cells.made(method, case, plan.cells.points(method)[0], "final").config
        central = config.algorithm["name"] == "centralized"
        alpha = None if central else config.data.partition.get("alpha")
        local = (config.local.lr, config.local.lr_decay, config.local.momentum, config.local.batch_size)
        network = (config.data.dataset["name"], config.model["name"], config.model.get("weights", "none"))
        found.append(((*network, central, alpha, *local), value.number))
    return found
