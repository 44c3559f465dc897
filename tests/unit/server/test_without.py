"""A run that begins without a site takes nothing that the sites or another run still need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedlens.base.errors import ConfigError
from fedlens.core.wire.census import CountedClient, SiteCensus
from fedlens.data.partition.roster import Roster
from fedlens.files.chained_log import ChainedLog
from fedlens.run.rundir import RunDir
from fedlens.server.retention import ServedRuns
from fedlens.server.serve_record import ServeRecord, digest_of
from fedlens.server.without import begin_without

SETTINGS = {"name": "wards"}


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
