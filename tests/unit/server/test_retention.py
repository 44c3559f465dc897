"""A purged run keeps its model, results and logs, and cannot be resumed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment
from fedlens.api import resume
from fedlens.base.errors import RunDirectoryError
from fedlens.files.chained_log import read_chained
from fedlens.pages.run_page import write_report
from fedlens.run.rundir import RunDir
from fedlens.server.retention import ServedRuns, purge
from fedlens.server.serve_record import ServeRecord, run_to_serve
from tests.unit.cli.commands import ran, refused
from tests.unit.identity.federation_kit import federation_in

SETTINGS: dict[str, Any] = {
    "name": "wards",
    "rounds": 2,
    "algorithm": "scaffold",
    "model": "linear",
    "local": {"steps": 1, "lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
    "record": {"updates": {"every": 1}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Experiment(**SETTINGS).run(tmp_path_factory.mktemp("runs") / "run", report=False).directory


def served(trained: Path, folder: Path, keep_days: int = 365) -> RunDir:
    """A copy of the run that looks as one of `fedlens serve`."""
    run = RunDir(shutil.copytree(trained, folder))
    record = ServeRecord("run", 0, "e" * 64, "f" * 64, "", keep_days=keep_days).started(run)
    assert record.attempt == 1
    run.serve_log_path.touch()
    return run


def test_a_purge_leaves_model_results_and_a_line(trained: Path, tmp_path: Path) -> None:
    run = served(trained, tmp_path / "run")
    before = {path.name for path in run.path.iterdir()}
    said = ran("purge", run.path)
    assert re.fullmatch(
        rf"purged: {re.escape(str(run.path))}: checkpoint \(\d+ files\), recordings \(\d+ files\), [\d,]+ bytes\n",
        said,
    )
    assert before - {path.name for path in run.path.iterdir()} == {"checkpoint", "recordings"}
    ((line, _, _),) = read_chained(run.answers_path)
    assert line["kind"] == "purged"
    assert line["files"] > 4
    assert (run.read_summary() or {})["status"] == "finished"
    assert write_report(run.path).exists()
    with pytest.raises(RunDirectoryError, match="was purged on"):
        resume(run.path)


def test_an_unfinished_run_is_not_served_again_after_a_purge(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = served(trained, tmp_path / "runs" / "wards" / "1")
    run.summary_path.unlink()
    record = ServeRecord.read(run)
    assert record is not None
    assert run_to_serve(None, "wards", record)[0].path == Path("runs/wards/1")
    purge(run)
    assert run_to_serve(None, "wards", record)[0].path != Path("runs/wards/1")


def test_a_federation_keeps_its_runs_for_some_days(trained: Path, tmp_path: Path) -> None:
    registry = federation_in(tmp_path)
    old, new = served(trained, tmp_path / "old", 20_000), served(trained, tmp_path / "new")
    for run in (old, new, old):
        ServedRuns(registry.folder).add(run.path)
    os.utime(old.serve_log_path, (1e9, 1e9))
    assert "nothing is due" not in ran("federation", "retention", registry.folder)
    assert "for 20000 days; it has served 2" in ran("federation", "retention", registry.folder, "20000")
    assert "nothing is due" in ran("purge", "--federation", registry.folder)
    ran("federation", "retention", registry.folder, "30")
    assert ran("purge", "--federation", registry.folder).startswith(f"purged: {old.path}")
    assert new.checkpoint_path.exists()
    assert not old.checkpoint_path.exists()
    assert "nothing is due" in ran("purge", "--federation", registry.folder)
    assert "not both" in refused("purge")


def test_a_run_is_not_kept_for_longer_than_its_sites_have_approved(trained: Path, tmp_path: Path) -> None:
    kept = ServedRuns(federation_in(tmp_path).folder)
    kept.add((run := served(trained, tmp_path / "run", 30)).path)
    kept.keep(365)
    last = run.serve_log_path.stat().st_mtime
    assert not kept.due(last + 29 * 86_400)
    assert kept.due(last + 31 * 86_400) == [run]
    kept.keep(7)
    assert kept.due(last + 8 * 86_400) == [run]


__all__ = ["served"]
