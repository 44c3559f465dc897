"""The page on studies: its study files are planned, its errors are those that appear, and no setting is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from fedlens.base.errors import ConfigError
from fedlens.results.rows import LINES, Row, write_info, write_lines
from fedlens.studies.changed_study import refuse_changed
from fedlens.studies.study_plan import StudyPlan
from fedlens.studies.study_settings import (
    MethodSettings,
    RandomDraws,
    Range,
    StopSettings,
    StudySettings,
    TuneSettings,
)

PAGE = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The study file")[2].partition("\n## ")[0]
FILES = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)


def planned(folder: Path, text: str, scale: str | None = None) -> StudyPlan:
    path = folder / "study.toml"
    path.write_text(text)
    return StudyPlan.load(path, scale)


def test_the_example_has_the_runs_that_the_page_describes(tmp_path: Path) -> None:
    plan = planned(tmp_path, FILES[0])
    assert list(plan.info({}).methods.values()) == ["FedAvg", "FedAvgM"]
    assert plan.info({}).cases == [{"case": "two classes"}, {"case": "iid"}]
    assert plan.cells.tuning_seeds == {"fedavg": [100, 101], "fedavgm": [100]}
    assert plan.number_of_runs == {"tune": 16, "final": 12}
    assert planned(tmp_path, FILES[0], "smoke").runs[0].settings["rounds"] == 2


@pytest.mark.parametrize(("text", "runs"), [(FILES[1], 24), (FILES[2], 2)])
def test_the_other_files_have_as_many_runs_as_the_page_says(tmp_path: Path, text: str, runs: int) -> None:
    assert len(planned(tmp_path, text).runs) == runs


def test_the_error_on_the_page_is_the_one_that_appears(tmp_path: Path) -> None:
    text = FILES[0].replace("effective_lr", '"local.lrr"')
    with pytest.raises(ConfigError) as error:
        planned(tmp_path, text)
    assert str(error.value).replace(f"{tmp_path}/", "") in SECTION


def test_the_message_on_a_changed_study_is_the_one_that_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("studies/study/paper")
    folder.mkdir(parents=True)
    plan = planned(folder, FILES[0])
    curve = {"round": [1], "test_accuracy": [0.5], "validation_accuracy": [0.5]}
    lines = [Row(run.digest, run.directory, "finished", None, 1, "test_accuracy", curve) for run in plan.runs]
    write_info(folder, plan.info({}))
    write_lines(folder / LINES, lines)
    changed = planned(tmp_path, FILES[0].replace("[0, 1, 2]", "[0, 1, 2, 3]"))
    with pytest.raises(ConfigError) as error:
        refuse_changed(folder, changed)
    assert str(error.value) in SECTION


@pytest.mark.parametrize(
    "table", [StudySettings, MethodSettings, TuneSettings, StopSettings, RandomDraws, Range]
)
def test_the_page_has_every_setting_of_a_study(table: type[BaseModel]) -> None:
    for name in table.model_fields:
        assert re.search(rf"`{name}`|\b{name} =|{name}s`|^{name}\b", SECTION, re.MULTILINE), name
