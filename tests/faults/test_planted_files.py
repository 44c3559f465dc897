"""Files of a stranger in the folders of runs and studies: none blocks, is followed, or is an unexpected error."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedlens import Experiment, Study
from fedlens.analyses.analyze import analyze
from fedlens.base.errors import DataError, RunDirectoryError
from fedlens.cli.main import app
from fedlens.data.partition.partition import Partition
from fedlens.run import checkpoint

pytestmark = pytest.mark.timeout(120)  # a pipe that is waited for never ends

SETTINGS = {
    "rounds": 1,
    "model": "linear",
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
    "local": {"lr": 0.1, "steps": 1},
    "engine": {"name": "inline"},
}
STUDY = """
seeds = [0]
[base]
rounds = 1
model = "linear"
data = { dataset = "digits", partition = { name = "iid", clients = 2 } }
local = { lr = 0.1, steps = 1 }
engine = "inline"
"""
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `run` with recordings and an analysis, and a study `study` of one run."""
    folder = tmp_path_factory.mktemp("made")
    recorded = {"record": {"local_models": {"every": 1}, "clients": True}, "checkpoint": {"seconds": 0}}
    Experiment(**SETTINGS, **recorded).run(folder / "run", report=False)
    analyze(folder / "run", ["dynamics"])
    (folder / "study.toml").write_text(STUDY)
    Study.load(folder / "study.toml").run(folder / "study", jobs=0, report=False)
    Image.new("L", (8, 8)).save(folder / "image.png")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be damaged; the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLANTED: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to(path.with_name(f".{path.name}.moved").absolute()),
    "deep": lambda path: path.write_text(DEEP),
    "no UTF-8": lambda path: path.write_bytes(b"\xff"),
}
RECORDING = "run/recordings/round-000001/recording.json"
# Each file, and a command that reads it.
COMMANDS = {
    "run/config.toml": "report run",
    "run/summary.json": "report run",
    "run/environment.json": "resume run",
    "run/metrics.jsonl": "report run",
    "run/clients.jsonl": "report run",
    "run/analysis/analysis.json": "analyze run dynamics",
    RECORDING: "analyze run dynamics",
    "run/model.safetensors": "predict run image.png --round last --out predicted",
    "study/study.json": "sweep study.toml --out study --jobs 0",
    "study/results.jsonl": "sweep study.toml --out study --jobs 0",
    "study/outputs.json": "sweep study.toml --out study --jobs 0",
    "study/data.json": "sweep study.toml --out study --jobs 0",
    "study/runs/RUN/planned.json": "sweep study.toml --out study --jobs 0",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_planted_file_is_one_sentence_that_names_it(here: Path, name: str) -> None:
    (run,) = (here / "study/runs").iterdir()
    path = here / name.replace("RUN", run.name)
    for planted, plant in PLANTED.items():
        kept = path.with_name(f".{path.name}.moved")
        if path.exists():
            path.rename(kept)
        else:
            kept.write_text("{}")
        plant(path)
        answer = CliRunner().invoke(app, COMMANDS[name].split())
        assert answer.exit_code in (1, 2), (planted, answer.output)
        lines = answer.stderr.splitlines()
        assert len(lines) == 1, (planted, answer.stderr)
        assert lines[0].startswith("error: "), (planted, answer.stderr)
        assert path.name in lines[0], (planted, answer.stderr)
        assert "unexpected" not in lines[0], (planted, answer.stderr)
        shutil.rmtree(path) if planted == "a folder" else path.unlink()
        kept.rename(path)


@pytest.mark.parametrize("key", ["model", "task", "classes", "preprocessing", "personal"])
def test_deep_metadata_of_a_model_are_one_sentence(here: Path, key: str) -> None:
    path = here / "run/model.safetensors"
    tree, about = checkpoint.read_model(path)
    checkpoint.write_model(path, tree, {**about, key: DEEP})
    answer = CliRunner().invoke(app, COMMANDS["run/model.safetensors"].split())
    assert answer.exit_code == 2
    assert answer.stderr.startswith(
        f"error: the metadata of model.safetensors are corrupt: '{key}': it is nested"
    )


def test_deep_json_in_a_partition_and_a_manifest_is_named(here: Path) -> None:
    path = here / "run/partition.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "ids": np.frombuffer(DEEP.encode(), np.uint8)})
    with pytest.raises(DataError, match="not a readable partition file: it is nested"):
        Partition.load(path)
    folder = checkpoint.path_of(here / "run/checkpoint", 1)
    content = f'{{"payload": {DEEP}'.encode()
    text = b'{"sha256": "%s", "content": %s}\n' % (hashlib.sha256(content).hexdigest().encode(), content)
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(RunDirectoryError, match=r"manifest\.json is not JSON: it is nested"):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["study/runs", "study/runs/RUN", "study/tables", "study/figures"])
def test_a_study_is_not_written_through_a_link(here: Path, name: str) -> None:
    (run,) = (here / "study/runs").iterdir()
    path = here / name.replace("RUN", run.name)
    elsewhere = here / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    before = {file: file.stat().st_mtime_ns for file in elsewhere.rglob("*")}
    answer = CliRunner().invoke(app, COMMANDS["study/study.json"].split())
    assert answer.exit_code == 2
    assert answer.stderr.startswith(f"error: {path.name} is a symbolic link (")
    assert {file: file.stat().st_mtime_ns for file in elsewhere.rglob("*")} == before


def test_the_runs_of_a_cost_are_not_written_through_a_link(here: Path) -> None:
    (here / "cost").mkdir()
    (here / "elsewhere").mkdir()
    (here / "cost/federated-seed0").symlink_to(here / "elsewhere")
    answer = CliRunner().invoke(app, ["cost", "run/config.toml", "--out", "cost"])
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error: federated-seed0 is a symbolic link (cost/federated-seed0)")
    assert not any((here / "elsewhere").iterdir())


def test_weights_are_not_made_through_a_link(here: Path) -> None:
    (here / "elsewhere").mkdir()
    (here / "weights.run").symlink_to(here / "elsewhere")
    answer = CliRunner().invoke(app, ["pretrain", "run/config.toml", "--out", "weights.safetensors"])
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error: weights.run is a symbolic link (weights.run)")
    assert not any((here / "elsewhere").iterdir())


FULL = {
    "results.jsonl": (COMMANDS["study/study.json"], "the study"),
    "study.json": (COMMANDS["study/study.json"], "the study"),
    "curves.svg": (COMMANDS["study/study.json"], "the study"),
    "cost.json": ("cost digits --out cost", "the comparison"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_said_with_how_to_continue(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever file it is that has no room."""
    if name == "results.jsonl":
        (here / "study" / name).unlink()  # else no line is added
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    command, thing = FULL[name]
    answer = CliRunner().invoke(app, command.split())
    assert answer.exit_code == 1, answer.output
    (line,) = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {thing} stopped: the disk is full, so ")
    assert name in line
    assert "; free some space, then run the same command again: it keeps the finished runs, and " in line
