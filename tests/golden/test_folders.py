"""Folders that an earlier commit wrote are resumed, read, compared and drawn as those of today.

`folders.py` made them, and says why a refactoring must not make them anew. Each folder stopped in the middle, and is
compared with files of the same work that was done without a stop, by the earlier commit: to the bit where the torch
and the processor are those that made it, and within 1e-5 elsewhere. Keys that a later commit adds are not compared.
"""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedlens import Experiment, Study, cost
from fedlens.analyses.analyze import analyze
from fedlens.api import load_result, resume
from fedlens.pages.compare import compare
from fedlens.pages.run_page import write_report
from fedlens.run.environment import machine
from tests.golden.folders import ARCHIVES, COST, RUNS, STOPS, STUDY
from tests.run_files import timeless

CLOSE = 1e-5  # on a processor with AVX2 alone, the loss of SimSiam was 3.3e-6 away
UNPACK = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def unpack(tmp_path: Path) -> UNPACK:
    """Unpacks an archive: the folder that stopped, and the files of the one that did not."""

    def unpacked(name: str) -> tuple[Path, Path]:
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as tar:
            tar.extractall(tmp_path / name, filter="data")
        return tmp_path / name / "started", tmp_path / name / "ended"

    return unpacked


def same_machine(run: Path) -> bool:
    """Whether a run was made by this torch on a processor like this."""
    then, now = json.loads((run / "environment.json").read_text()), machine()
    return then["torch"] == now["torch"] and all(
        then["cpu"][key] == now["cpu"][key] for key in ("model", "capability")
    )


def kept(before: Any, now: Any, exact: bool) -> None:
    """Asserts that every value of `before` is in `now`, which may have more keys."""
    if isinstance(before, Mapping):
        assert before.keys() <= now.keys()
        for key, value in before.items():
            kept(value, now[key], exact)
    elif isinstance(before, list):
        assert len(now) == len(before)
        for one, other in zip(before, now, strict=True):
            kept(one, other, exact)
    else:
        assert now == (before if exact or type(before) is not float else pytest.approx(before, abs=CLOSE))


def kept_file(ended: Path, folder: Path, name: str, exact: bool) -> None:
    """Asserts that a file of the folder holds what the kept one holds."""
    if not (ended / name).exists():
        assert not (folder / name).exists()
    elif name.endswith(".jsonl"):
        kept(_lines(ended / name), _lines(folder / name), exact)
    elif name.endswith(".json"):
        kept(_json(ended / name), _json(folder / name), exact)
    else:
        before, now = load_file(ended / name), load_file(folder / name)
        assert before.keys() == now.keys()
        for leaf, value in before.items():
            torch.testing.assert_close(now[leaf], value, rtol=0, atol=0 if exact else CLOSE)


def _lines(path: Path) -> Any:
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()]


def _json(path: Path) -> Any:
    return timeless(json.loads(path.read_text()))


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_that_stopped_ends_as_if_it_had_not(name: str, unpack: UNPACK) -> None:
    folder, ended = unpack(name)
    result = resume(folder, report=False)
    assert result.summary["status"] == "finished"
    exact = same_machine(folder)
    for file in ("metrics.jsonl", "clients.jsonl", "summary.json", "model.safetensors", "best.safetensors"):
        kept_file(ended, folder, file, exact)
    assert f"{RUNS[name]['rounds']}" in write_report(folder).read_text("utf-8")


def test_the_folders_hold_what_they_are_kept_for(unpack: UNPACK) -> None:
    """Lines after the checkpoint, state files, a best round before the stop, recordings, a warning to come."""
    killed, _ = unpack("fedavg")
    assert not (killed / "summary.json").exists()
    rounds = [line["round"] for line in _lines(killed / "metrics.jsonl")]
    assert max(rounds) == STOPS["fedavg"] + 2
    assert max(path.name for path in (killed / "checkpoint").iterdir()) == f"round-{STOPS['fedavg']:06d}"
    assert len(list((unpack("scaffold")[0] / "states").iterdir())) == 6
    paused, ended = unpack("recorded")
    assert _json(paused / "summary.json")["best"]["round"] < STOPS["recorded"]
    assert _json(ended / "summary.json")["best"]["round"] < STOPS["recorded"]
    assert len(list((paused / "recordings").iterdir())) == 3
    paused, ended = unpack("chance")
    assert [len(_json(path / "summary.json")["warnings"]) for path in (paused, ended)] == [0, 1]
    assert sum(path.stat().st_size for path in ARCHIVES.iterdir()) < 400_000


def test_recordings_of_before_and_after_the_stop_are_analyzed(unpack: UNPACK) -> None:
    folder, _ = unpack("recorded")
    resume(folder, report=False)
    assert [path.name[-1] for path in sorted((folder / "recordings").iterdir())] == ["1", "2", "4", "6"]
    rows = analyze(folder, ["drift"]).rows["drift"]
    assert {row["round"] for row in rows} == {1, 2, 4, 6}


def test_runs_are_compared_and_used(unpack: UNPACK) -> None:
    """Those that `cost` made, which the earlier commit finished."""
    folder, _ = unpack("cost")
    rows = compare([folder / "federated-seed0", folder / "centralized-seed0"])
    assert [row["algorithm"] for row in rows] == ["fedavg", "centralized"]
    answer = _json(folder.parent / "ended" / "cost.json")
    for row, role in zip(rows, ("federated", "centralized"), strict=True):
        assert row["final"] == pytest.approx(answer["overall"][role]["test"]["mean"])
    result = load_result(folder / "federated-seed0")
    assert result.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    write_report(folder / "federated-seed0")


def test_a_study_continues_and_gives_its_table(unpack: UNPACK) -> None:
    folder, ended = unpack("study")
    (unfinished,) = [run for run in (folder / "runs").iterdir() if not (run / "model.safetensors").exists()]
    finished = _models(folder / "runs")
    result = Study(**STUDY).run(folder, jobs=0)
    assert result.failed == []
    assert len(finished) == 3
    assert finished.items() <= _models(folder / "runs").items(), "a finished run was repeated"
    exact = same_machine(unfinished)
    kept_file(ended, folder, "results.jsonl", exact)
    kept(_table(ended / "cells.csv"), _table(folder / "cells.csv"), exact)
    assert "fedavgm" in (folder / "study.html").read_text("utf-8")


def _models(runs: Path) -> dict[Path, int]:
    """When the model of each finished run was written."""
    return {path: path.stat().st_mtime_ns for path in runs.glob("*/model.safetensors")}


def _table(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: _number(value) for key, value in row.items() if "second" not in key} for row in rows]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def test_a_cost_continues_and_gives_its_answer(unpack: UNPACK) -> None:
    folder, ended = unpack("cost")
    exact = same_machine(folder / "federated-seed0")
    finished = _models(folder)
    result = cost(Experiment(**COST), seeds=1, jobs=0, out=folder)
    assert len(finished) == 3
    assert finished.items() <= _models(folder).items(), "a finished run was repeated"
    before, now = _json(ended / "cost.json"), _json(folder / "cost.json")
    for key in (
        "runs",
        "overall",
        "bytes_per_client",
        "differences",
        "clients",
        "measures",
        "metric",
        "emd",
        "work",
    ):
        kept(before[key], now[key], exact)
    assert "local-only" in result.page.read_text("utf-8")
    assert json.loads((folder / "cost.json").read_text())["sentences"]
