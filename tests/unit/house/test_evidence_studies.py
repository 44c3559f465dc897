"""The studies of docs/evidence can be planned: each run's settings are right, and tuning is equal for all methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.studies.study_plan import StudyPlan

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "docs" / "evidence").glob("*.toml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_study_of_the_evidence_gives_every_method_the_same_number_of_tuning_runs(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    plan = StudyPlan.load(file.relative_to(ROOT))
    numbers = [plan.number_of_runs["tune"] / len(plan.cells.methods) / len(plan.cells.cases)]
    assert plan.info({}).tuning.get("budget", 0) == numbers[0]
    assert plan.command == f"fedlens sweep docs/evidence/{file.name}"
