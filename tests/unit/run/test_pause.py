"""A run that pauses after a round and is resumed later gives what an unbroken run gives, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment, load_result, resume
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.pages.compare import compare
from fedlens.pages.run_page import write_report
from tests.contract.contract_kit import nightly_but
from tests.run_files import content

SETTINGS: dict[str, Any] = {
    "rounds": 5,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6}},
    "engine": "inline",
}
WITH_STATE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"algorithm": {"name": "fedavgm", "momentum": 0.9}},
    "fedadam": {"algorithm": {"name": "fedadam"}},
    "scaffold": {"algorithm": "scaffold", "select": {"clients_per_round": 3}},
    "feddyn": {"algorithm": "feddyn"},
    "clients measured": {
        "data": {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"},
        "evaluation": {"clients": "all", "every": 2},
        "record": {"clients": True},
    },
    "evaluated every 3": {"evaluation": {"every": 3}},
}


def outcome(directory: Path) -> dict[str, Any]:
    """The files of a run, of its checkpoints the last: a pause saves one more."""
    files = content(directory)
    return {name: value for name, value in files.items() if not name.startswith("checkpoint/")} | {
        name: value for name, value in files.items() if name.startswith("checkpoint/round-000005/")
    }


@pytest.mark.parametrize("case", nightly_but({"fedavgm", "scaffold", "clients measured"}, WITH_STATE))
def test_a_run_paused_twice_gives_what_an_unbroken_run_gives(case: str, tmp_path: Path) -> None:
    experiment = Experiment(**{**SETTINGS, **WITH_STATE[case]})
    experiment.run(tmp_path / "whole", report=False)
    paused = experiment.run(tmp_path / "paused", report=False, until=1)
    assert (paused.summary["status"], paused.summary["rounds_done"]) == ("paused", 1)
    assert paused.summary["rounds"] == 5
    again = resume(tmp_path / "paused", report=False, until=4)
    assert [line["round"] for line in again.metrics] == [0, 1, 2, 3, 4]
    assert not (tmp_path / "paused" / "model.safetensors").exists()
    assert resume(tmp_path / "paused", report=False).summary["status"] == "finished"
    assert outcome(tmp_path / "paused") == outcome(tmp_path / "whole")


@pytest.mark.usefixtures("quick_workers")
def test_an_evaluation_beside_the_next_round_is_finished_before_a_pause(tmp_path: Path) -> None:
    settings = {**SETTINGS, "rounds": 3, "engine": {"name": "processes", "workers": 1}}
    experiment = Experiment(**settings, evaluation={"overlap": True})
    experiment.run(tmp_path / "whole", report=False)
    paused = experiment.run(tmp_path / "paused", report=False, until=1)
    assert "test_accuracy" in paused.metrics[1]
    resume(tmp_path / "paused", report=False)
    names = ("metrics.jsonl", "model.safetensors", "evaluation.npz")
    whole, broken = content(tmp_path / "whole"), content(tmp_path / "paused")
    assert [broken[name] for name in names] == [whole[name] for name in names]


def test_a_pause_after_the_last_round_is_the_end(tmp_path: Path) -> None:
    result = Experiment(**{**SETTINGS, "rounds": 1}).run(tmp_path / "run", report=False, until=9)
    assert result.summary["status"] == "finished"


def test_a_run_that_is_paused_at_the_round_or_later_is_left_as_it_is(tmp_path: Path) -> None:
    Experiment(**SETTINGS).run(tmp_path / "run", report=False, until=2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.name != ".lock"}
    assert resume(tmp_path / "run", report=False, until=2).summary["rounds_done"] == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert Experiment(**SETTINGS).run(tmp_path / "start", until=0, report=False).summary["rounds_done"] == 0


def test_a_pause_before_the_first_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pause after round -1"):
        Experiment(**SETTINGS).run(tmp_path / "run", until=-1)
    assert not (tmp_path / "run").exists()


@pytest.mark.report_page
def test_reports_and_comparisons_say_that_a_run_is_paused(tmp_path: Path) -> None:
    paused = Experiment(**SETTINGS).run(tmp_path / "run", report=False, until=2)
    assert "paused, round 2 of 5" in repr(paused)
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "The run is paused" in page
    assert "fedlens resume" in page
    assert [row["status"] for row in compare([tmp_path / "run"])] == ["paused"]
    with pytest.raises(RunDirectoryError, match="the run is paused, so it has no model"):
        load_result(tmp_path / "run").predict("photo.png")


def test_the_processor_time_goes_on_where_the_pause_stopped_it(tmp_path: Path) -> None:
    experiment = Experiment(**SETTINGS)
    first = experiment.run(tmp_path / "run", report=False, until=3).summary["totals"]["cpu_seconds"]
    whole = resume(tmp_path / "run", report=False).summary["totals"]["cpu_seconds"]
    assert 0 < first < whole
    manifest = json.loads((tmp_path / "run/checkpoint/round-000005/manifest.json").read_text("utf-8"))
    assert manifest["content"]["payload"]["map"]["cpu_seconds"] == whole
