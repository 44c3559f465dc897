"""Every engine on GPUs, and what an engine does with several of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedlens import Study
from fedlens.run.rundir import RunDir
from tests.contract.contract_kit import nightly_but
from tests.gpu.conftest import SIMULATED
from tests.gpu.device_kit import GPU, GROUP_NORM, agree, near, run, small

pytestmark = pytest.mark.usefixtures("quick_workers")
ENGINES: dict[str, dict[str, Any]] = {
    "processes": {"engine": "processes", "workers": 2},
    "groups in workers": {"engine": "processes", "workers": 2, "group": 2},
    "default": {"engine": "default"},
    "auto": {"engine": "auto"},
    "verified": {"engine": "vectorized", "verify": 1},
}

STUDY = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}


@pytest.mark.parametrize("engine", nightly_but(("processes", "verified"), ENGINES))
def test_runs_on_two_gpus_agree_with_the_processors(engine: str, two_gpus: None, tmp_path: Path) -> None:
    """Clients with a state, so that it crosses rounds, workers and GPUs."""
    given = small("scaffold", model=GROUP_NORM, select={"name": "all"})
    here = run(tmp_path / "cpu", given, "cpu")
    there = run(tmp_path / "gpu", given, GPU, **ENGINES[engine])
    (agree if engine == "processes" else near)(there, here)


def test_a_gpu_is_chosen_by_its_number(two_gpus: None, tmp_path: Path) -> None:
    given = small("fedprox")
    agree(run(tmp_path / "gpu", given, "cuda:1"), run(tmp_path / "cpu", given, "cpu"))


@pytest.mark.nightly
def test_groups_become_smaller_where_memory_runs_out(
    simgpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Memory for the largest leaf of two clients, and not of four."""
    given = small("fedprox", model={"name": "mlp", "hidden": 100}, select={"name": "all"})
    here = run(tmp_path / "cpu", given, "cpu", "vectorized")
    monkeypatch.setattr(simgpu, "LARGEST", 2.5 * 4 * 100 * 100)
    near(run(tmp_path / "gpu", given, GPU, "vectorized"), here)
    assert "out of memory with 4 clients at once; trying 2" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.usefixtures("two_gpus")
def test_the_runs_of_a_study_are_distributed_over_the_gpus(tmp_path: Path) -> None:
    study = Study(base=STUDY, seeds=[0, 1])
    there = study.run(tmp_path / "gpus", jobs=2, report=False)
    here = Study(base={**STUDY, "engine": {"device": "cpu"}}, seeds=[0, 1]).run(
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
