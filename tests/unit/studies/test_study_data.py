"""What a study shows without training: the clients' data and the costs of models, made before its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlens.results.data_json import read_costs, read_populations
from fedlens.results.rows import Results, read_data
from fedlens.results.tables import study_tables
from fedlens.settings.config_source import read_source
from fedlens.studies.study import Study
from fedlens.studies.study_data import make_data, model_cost
from fedlens.studies.study_plan import StudyPlan

ALPHA = "data.partition.alpha"


def _study(**more: Any) -> dict[str, Any]:
    partition = {"name": "dirichlet-classwise", "clients": 5, "alpha": 1.0, "minimum": 1}
    return {
        "base": "digits", "seeds": [3, 4], "set": {"model": "linear", "rounds": 1, "data.partition": partition},
        "grid": {ALPHA: [0.2, 5.0]}, "figures": [{"kind": "populations"}], "tables": [{"kind": "datasets"}],
        **more,
    }  # fmt: skip


def _made(tmp_path: Path, study: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    make_data(StudyPlan.load(study), tmp_path, say=said.append)
    return read_data(tmp_path), said


def test_a_study_of_data_alone_plans_no_runs(tmp_path: Path) -> None:
    plan = StudyPlan.load(_study())
    assert plan.due({}) == []
    assert plan.info({}).entries == []
    assert plan.number_of_runs["final"] == 0
    assert study_tables(Results(StudyPlan.load(_study(tables=[])).info({}), {})) == []
    assert len(StudyPlan.load(_study(figures=[{"kind": "curves"}])).due({})) == 4


def test_each_case_has_the_population_of_its_first_seed(tmp_path: Path) -> None:
    data, _ = _made(tmp_path, _study())
    few, many = read_populations(data["populations"])
    assert (few.case, few.seed, many.case) == ({ALPHA: 0.2}, 3, {ALPHA: 5.0})
    assert few.census.emd() > many.census.emd()
    assert sum(few.test) == 360
    assert few.method == ""


def test_methods_that_see_other_data_have_populations_of_their_own(tmp_path: Path) -> None:
    methods = {"few": {"label": "Few"}, "many": {"label": "Many", "set": {"data.partition.clients": 9}}}
    data, _ = _made(tmp_path, _study(methods=methods, same_data=False))
    made = [(p.method, len(p.ids)) for p in read_populations(data["populations"])]
    assert made == [("Few", 5), ("Many", 9), ("Few", 5), ("Many", 9)]


def test_what_was_made_is_kept_until_its_settings_change(tmp_path: Path) -> None:
    _, first = _made(tmp_path, _study())
    before = (tmp_path / "data.json").read_bytes()
    _, again = _made(tmp_path, _study())
    assert (len(first), again, (tmp_path / "data.json").read_bytes()) == (2, [], before)
    _, changed = _made(tmp_path, _study(grid={ALPHA: [0.2, 7.0]}))
    assert len(changed) == 1


def test_a_study_that_shows_no_data_writes_none(tmp_path: Path) -> None:
    _made(tmp_path, _study(figures=[], tables=[]))
    assert not (tmp_path / "data.json").exists()


def test_costs_need_no_data_where_shape_and_classes_are_stated(tmp_path: Path) -> None:
    table = {"kind": "efficiency", "runs": False, "shape": [3, 32, 32], "classes": 100}
    study = {
        "base": "fedcv/table11", "tables": [table],
        "methods": {"scratch": {"set": {"model.name": "resnet20", "model.weights": "none"}},
                    "linear": {"set": {"model.name": "linear", "model.weights": "none"}}},
    }  # fmt: skip
    data, _ = _made(tmp_path, study)
    network, linear = read_costs(data["costs"])
    assert (linear.parameters, linear.backbone, linear.multiply_adds) == (307_300, 0, 307_200)
    assert network.parameters - network.backbone == 64 * 100 + 100
    assert linear.memory is None


def test_the_data_of_a_study_are_there_after_it_was_run(tmp_path: Path) -> None:
    tables = [{"kind": "datasets"}, {"kind": "efficiency", "runs": False}]
    Study(**_study(tables=tables)).run(tmp_path / "s", jobs=0, report=False)
    results = Results.read(tmp_path / "s")
    assert len(results.data["populations"]) == 2
    assert results.lines == {}
    assert json.loads((tmp_path / "s" / "study.json").read_text())["entries"] == []


@pytest.mark.parametrize(
    ("recipe", "changes", "shape", "classes", "parameters", "trained"),
    [
        ("fedcv/table7", ["model.freeze=backbone"], (3, 512, 512), 21, 59_344_309, 16_844_149),
        ("fedcv/table8", [], (3, 640, 640), 80, 7_276_605, 7_276_605),
    ],
)
def test_the_networks_of_fedcv_have_the_counts_of_its_tables(
    recipe: str, changes: list[str], shape: tuple[int, ...], classes: int, parameters: int, trained: int
) -> None:
    cost = model_cost(read_source(recipe, changes).values, shape=shape, classes=classes)
    assert (cost.parameters, cost.trainable) == (parameters, trained)


def test_memory_of_a_step_is_measured_in_a_process_of_its_own() -> None:
    cost = model_cost(
        read_source("digits", ["model=linear"]).values, memory=True, shape=(1, 8, 8), classes=10
    )
    assert cost.memory is not None
    assert cost.estimated is not None
    assert (cost.device, cost.batch) == ("cpu", 10)
