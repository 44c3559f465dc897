"""A run that begins without a site takes nothing that the sites or another run still need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedlens.api import resume
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.data.partition.roster import Roster
from fedlens.files.chained_log import ChainedLog
from fedlens.run.rundir import RunDir
from fedlens.server.retention import ServedRuns
from fedlens.server.serve_record import ServeRecord, digest_of, run_to_serve
from fedlens.server.without import begin_without

SETTINGS = {"name": "wards"}
DATA = {"dataset": "digits", "partition": {"name": "iid", "clients": 3}}
EXPERIMENT = {
    **SETTINGS,
    "rounds": 2,
    "model": "mlp",
    "algorithm": "fedavg",
    "data": DATA,
    "local": {"lr": 0.1, "steps": 1},
}


def record(aggregate: str, **settings: Any) -> ServeRecord:
    contract = tomli_w.dumps({"aggregate": {"name": aggregate}})
    return ServeRecord.new({**SETTINGS, **settings}, b"root", contract)


def served(folder: Path, aggregate: str, *rounds: int) -> tuple[RunDir, ServedRuns]:
    """A run of three sites that stopped, with an answer of ward-a in some rounds and a checkpoint of round 1."""
    run, runs = RunDir(folder / "base"), ServedRuns(folder)
    (run.checkpoint_path / "round-000001").mkdir(parents=True)
    (run.checkpoint_path / "round-000001" / "manifest.json").write_text("{}")
    names = ("ward-a", "ward-b", "ward-c")
    Roster.of([SiteCensus(name, [CountedClient(name, 1)]) for name in names]).save(run.roster_path)
    for name in (run.config_path, run.environment_path, run.initial_path):
        name.write_text("")
    log = ChainedLog(run.answers_path)
    for round in rounds:
        log.append({"round": round, "attempt": 1, "site": "ward-a", "decision": "taken"})
    log.close()
    record(aggregate).started(run)
    runs.add(run.path)
    return run, runs


def test_a_run_that_goes_on_without_a_site_is_not_resumed(tmp_path: Path) -> None:
    """Both would have one identity, so sites would take them for one run."""
    base, runs = served(tmp_path, "mean")
    base.config_path.write_text(tomli_w.dumps(EXPERIMENT))
    base.environment_path.unlink()
    assert "it goes on after round 1" in begun(tmp_path, runs, "mean")
    with pytest.raises(RunDirectoryError, match=f"goes on elsewhere.*resume the run in {tmp_path / 'new'}"):
        resume(base.path)
    assert f"from the start: {base.path} goes on in {tmp_path / 'new'}" in begun(
        tmp_path, runs, "mean", "other"
    )
    assert list((tmp_path / "other").iterdir()) == []


def test_a_server_begins_a_new_run_after_one_that_goes_on_without_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, runs = served(tmp_path / "runs" / "wards", "mean")
    assert run_to_serve(None, "wards", record("mean"))[0].path == base.path.relative_to(tmp_path)
    begun(tmp_path, runs, "mean")
    assert run_to_serve(None, "wards", record("mean"))[0].path.name != "base"


def begun(folder: Path, runs: ServedRuns, aggregate: str, out: str = "new") -> str:
    new = RunDir.create(folder / out, "wards", None)
    return begin_without(new, record(aggregate, without=["ward-c"]), ["ward-c"], runs, digest_of(SETTINGS))[1]


def test_a_secure_sum_is_not_begun_again(tmp_path: Path) -> None:
    _, runs = served(tmp_path, "secagg", 1)
    with pytest.raises(ConfigError, match=r"never sum a model twice.*another seed"):
        begun(tmp_path, runs, "secagg")


def test_a_secure_sum_without_an_answer_is_begun_again(tmp_path: Path) -> None:
    _, runs = served(tmp_path, "secagg")
    assert "it goes on after round 1" in begun(tmp_path, runs, "secagg")
