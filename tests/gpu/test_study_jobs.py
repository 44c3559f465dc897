"""The runs of a study that several GPUs carry out at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens import Study
from fedlens.experiment.rundir import RunDir
from tests.gpu.conftest import SIMULATED

BASE = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}


@pytest.mark.nightly
@pytest.mark.usefixtures("two_gpus")
def test_the_runs_of_a_study_are_distributed_over_the_gpus(tmp_path: Path) -> None:
    study = Study(base=BASE, seeds=[0, 1])
    there = study.run(tmp_path / "gpus", jobs=2, report=False)
    here = Study(base={**BASE, "engine": {"device": "cpu"}}, seeds=[0, 1]).run(
        tmp_path / "cpu", jobs=0, report=False
    )
    runs = [RunDir(folder) for folder in (tmp_path / "gpus" / "runs").iterdir()]
    names = [[gpu["name"] for gpu in (run.read_environment() or {})["gpus"]] for run in runs]
    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1] or not SIMULATED
    assert {run.read_config()["engine"]["device"] for run in runs} == {"cuda"}
    assert [row["device"] for row in (*there.runs, *here.runs)] == ["cuda", "cuda", "cpu", "cpu"]
    for on_gpu, on_cpu in zip(there.runs, here.runs, strict=True):
        assert on_gpu["test_loss"] == pytest.approx(on_cpu["test_loss"], rel=0 if SIMULATED else 1e-3)
