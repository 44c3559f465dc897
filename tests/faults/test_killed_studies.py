"""Studies that are killed or interrupted, whose disk fills, or that two commands want: they go on to the same files."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.results.rows import LINES
from tests.faults.run_kit import fedlens, lives
from tests.unit.studies.study_kit import without_clock

STUDY = """
base = {{ rounds = {rounds}, model = "linear", data = {{ dataset = "digits", partition = {{ name = "dirichlet", \
clients = 4, alpha = 0.3 }}, normalize = "unit" }}, local = {{ lr = 0.1 }}, checkpoint = {{ seconds = 0.0 }} }}
seeds = [0, 1]
[methods.fedavg]
grid = {{ "local.lr" = [0.01, 0.03, 0.1, 0.3] }}
[methods.fedprox]
set = {{ "algorithm.name" = "fedprox", "algorithm.mu" = 0.1 }}
grid = {{ "local.lr" = [0.01, 0.03, 0.1, 0.3] }}
[tune]
seeds = [10]
[stop]
halving = 2
first = 2
"""
WALL = ("seconds", "elapsed", "cpu_seconds")


def study(folder: Path, rounds: int = 6) -> None:
    (folder / "study.toml").write_text(STUDY.format(rounds=rounds), encoding="utf-8")


def sweep(cwd: Path, out: str, jobs: int = 2, *more: str, **how: Any) -> Any:
    return fedlens("sweep", "study.toml", "--out", out, "--jobs", str(jobs), "--quiet", *more, cwd=cwd, **how)


def finished(cwd: Path, out: str, jobs: int = 2) -> Path:
    process = sweep(cwd, out, jobs)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return cwd / out


def finished_here(cwd: Path, out: str) -> Path:
    """The same in this process, without workers."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, ["sweep", "study.toml", "--out", out, "--jobs", "0", "--quiet"])
    assert done.exit_code == 0, done.output
    return cwd / out


def outputs(folder: Path) -> dict[str, Any]:
    """Every file of results, wall-clock values aside."""
    found: dict[str, Any] = {"results": without_clock(folder)}
    info = json.loads((folder / "study.json").read_text())
    assert info.pop("command") == f"fedlens sweep study.toml --out {folder.name}"
    found["study.json"] = info
    for path in [folder / "study.toml", *sorted(folder.glob("cells.*"))]:
        found[path.name] = path.read_bytes()
    for path in sorted((folder / "tables").iterdir()):
        found[path.name] = path.read_bytes()
    assert (folder / "study.html").stat().st_size > 10_000
    rows = list(csv.DictReader((folder / "runs.csv").read_text("utf-8").splitlines()))
    found["runs"] = [{key: value for key, value in row.items() if key not in WALL} for row in rows]
    return found


def lines(folder: Path) -> int:
    path = folder / LINES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def done(folder: Path) -> int:
    """Bytes of the rounds of all runs, which grow while the study works."""
    return sum(path.stat().st_size for path in (folder / "runs").glob("*/metrics.jsonl"))


def rounds(folder: Path) -> int:
    """Rounds of the run that has most."""
    files = (folder / "runs").glob("*/metrics.jsonl")
    return max((path.read_bytes().count(b"\n") for path in files), default=0)


def killed(cwd: Path, out: str, draw: random.Random, spread: float) -> bool:
    """Starts the study, and kills it some time after it has begun to train; whether that hit."""
    process, before = sweep(cwd, out), done(cwd / out)
    while process.poll() is None and done(cwd / out) <= before:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, spread))
    process.kill()
    process.communicate(timeout=60)
    return bool(process.returncode == -signal.SIGKILL)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of the study, carried out without an accident by one process."""
    folder = tmp_path_factory.mktemp("straight")
    study(folder)
    return outputs(finished_here(folder, "broken"))


def test_killed_and_continued_it_gives_the_files_of_one_that_was_not(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    study(tmp_path)
    assert killed(tmp_path, "broken", random.Random(3), 0.1)
    broken = outputs(finished_here(tmp_path, "broken"))
    assert broken == straight
    # Of a method's four points two end at the first rung; then come two seeds of the best.
    assert [line["rounds"] for line in broken["results"]].count(2) == 4
    assert [line["status"] for line in broken["results"]].count("finished") >= 4


@pytest.mark.nightly  # once above
def test_killed_twenty_times_at_random_moments_it_gives_the_same_files(tmp_path: Path) -> None:
    study(tmp_path, rounds=150)
    draw = random.Random(20)
    assert sum(killed(tmp_path, "broken", draw, 0.5) for _ in range(20)) >= 10
    assert outputs(finished(tmp_path, "broken")) == outputs(finished_here(tmp_path, "straight"))


def test_a_second_sweep_is_refused_and_ctrl_c_saves_the_runs_of_the_first(tmp_path: Path) -> None:
    study(tmp_path, rounds=400)
    process = sweep(tmp_path, "out")
    while not list((tmp_path / "out" / "runs").glob("*/checkpoint")) and process.poll() is None:
        time.sleep(0.01)
    with lives(tmp_path) as play:
        (second,) = play([{"args": ["sweep", "study.toml", "--out", "out", "--jobs", "2", "--quiet"]}])
    assert f"error: the study out is in use by process {process.pid}" in second["err"]
    while rounds(tmp_path / "out") < 20 and process.poll() is None:  # those of the first rung are over
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == (
        "interrupted: all running runs are saved; continue with: "
        "fedlens sweep study.toml --out out --jobs 2 --quiet"
    )
    assert "Traceback" not in err
    summaries = [path.read_text() for path in (tmp_path / "out" / "runs").glob("*/summary.json")]
    assert any('"status": "interrupted"' in text for text in summaries)
    for directory in (tmp_path / "out" / "runs").iterdir():
        assert (directory / "summary.json").exists(), "a run that was begun is saved or ended"


def test_a_disk_that_fills_stops_the_study_with_a_sentence_and_it_continues(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    study(tmp_path)

    words = ["sweep", "study.toml", "--out", "broken", "--jobs", "0", "--quiet"]
    with lives(tmp_path) as play:
        (ended,) = play([{"args": words, "limit": 3000}])
    err = ended["err"]
    assert ended["code"] == 1, err
    assert "error: the study stopped: " in err
    assert "run the same command again: it keeps the finished runs, and continues" in err
    assert "Traceback" not in err
    assert lines(tmp_path / "broken") == 0
    assert outputs(finished_here(tmp_path, "broken")) == straight
