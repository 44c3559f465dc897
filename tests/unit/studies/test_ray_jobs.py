"""The runs of a study as tasks of Ray: the same lines and files as in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.studies.carry_out import RunOptions
from fedlens.studies.jobs import sweep
from fedlens.studies.planned import DueRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.ray_jobs import LOCAL, RayJobs
from fedlens.studies.store import StudyStore
from fedlens.studies.study_plan import StudyPlan
from tests.unit.engines.ray_kit import NEEDS_RAY
from tests.unit.studies.study_kit import FAILING, FixedPlan, carried_out, planned, without_clock
from tests.unit.studies.test_pretrained import STUDY, run

pytestmark = [NEEDS_RAY, pytest.mark.usefixtures("ray_here")]


@pytest.fixture(scope="module")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray that the tests of this file share."""
    jobs = RayJobs(RunOptions(tmp_path_factory.mktemp("ray")), 1, LOCAL)
    yield
    jobs.close()


class Hidden(RayJobs):
    """Nodes do not find the marker, as if they did not see the folder."""

    def _submit(self, due: DueRun) -> None:
        self._marker.unlink(missing_ok=True)
        super()._submit(due)


# Nodes that do not share the folder get the pretraining below.
@pytest.mark.parametrize("kind", [RayJobs, pytest.param(Hidden, marks=pytest.mark.nightly)])
def test_a_cluster_gives_the_lines_of_this_process(kind: type[RayJobs], tmp_path: Path) -> None:
    """Paused runs are continued too, on nodes that have to get their directory first."""
    plan = FixedPlan([planned(0), planned(1), FAILING], rung=2)
    here, there = tmp_path / "here", tmp_path / "there"
    carried_out(here, plan)
    carried_out(there, plan, lambda due: kind(RunOptions(there / "runs"), 1, LOCAL))
    assert without_clock(there) == without_clock(here)
    names = {path.name for path in (there / "runs").iterdir()}
    assert names >= {run.directory for run in plan.runs[:2]}
    files = {path.name for path in (there / "runs" / plan.runs[0].directory).iterdir()}
    assert files >= {"config.toml", "metrics.jsonl", "summary.json", "planned.json", "model.safetensors"}
    assert not list(there.glob(".shared-*"))


@pytest.mark.nightly
def test_a_node_that_does_not_share_the_folder_is_sent_the_pretraining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = StudyStore(tmp_path / "there")
    with store.lock():
        sweep(
            StudyPlan.load(STUDY),
            store,
            lambda due: Hidden(RunOptions(store.runs), 1, LOCAL),
            StudyProgress(),
        )
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    run(tmp_path / "here")
    assert without_clock(tmp_path / "there") == without_clock(tmp_path / "here")
