"""Python files of the user's own that are edited after a run has used them: they are not executed unasked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from fedlens import load_result, resume
from fedlens.analyses.opened_run import open_run
from fedlens.api import Experiment
from fedlens.base.errors import RunDirectoryError, RunFailed
from fedlens.cli.main import app
from fedlens.run.rundir import RunDir
from tests.faults.run_kit import sha, summary
from tests.faults.test_edited_runs import forged
from tests.faults.test_run_directories import Stops
from tests.new_process import new_process

SETTINGS = {
    "rounds": 3,
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
    "model": "own_model.py:Net",
    "client": "own_rule.py:halved",
    "local": {"lr": 0.1},
    "engine": "inline",
    "checkpoint": {"seconds": 0},
}
MODEL = """
from pathlib import Path

from torch import nn

from widths import WIDTH

Path("executed").write_text("")


class Net(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, classes))
"""
RULE = """
from fedlens.local.rules import ClientRule

def halved() -> ClientRule:
    return ClientRule(name="halved", grad=lambda gradients, parameters, context: [g / 2 for g in gradients])
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a run that stopped after round 2 of 3, and the user's files; in a new process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in (("own_model", MODEL), ("own_rule", RULE), ("widths", "WIDTH = 5\n")):
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(KeyboardInterrupt):
        Experiment(**SETTINGS).run("run", report=False, progress=Stops(2))
    new_process("widths")
    yield tmp_path
    new_process("widths")


def edited(path: Path, text: str = "# mine\n") -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize("name", ["own_model.py", "own_rule.py", "widths.py"])
def test_an_edited_file_is_refused_before_it_is_executed_and_resumed_when_accepted(
    here: Path, name: str
) -> None:
    edited(here / name)
    (here / "executed").unlink()
    answer = CliRunner().invoke(app, ["resume", "run", "--no-report"])
    assert answer.exit_code == 2
    assert answer.stderr.startswith(
        f"error: {here / name} was edited since round 2; undo the edit, or use the file as"
    )
    assert (
        "it is now with 'fedlens resume run --accept-changes' (in Python: accept_changes=True)"
        in answer.stderr
    )
    assert answer.stderr.count("\n") == 1
    assert not (here / "executed").exists()
    new_process("widths")
    answer = CliRunner().invoke(app, ["resume", "run", "--no-report", "--accept-changes"])
    assert answer.exit_code == 0, answer.output
    assert f"accepted: {here / name} was edited" in answer.output.replace("\n", " ")
    (change,) = summary(here / "run")["changes"]
    assert (change["after_round"], change["key"]) == (2, str(here / name))
    assert change["after"] == sha(here / name) != change["before"]
    # Once accepted, they are the files of the run.
    assert resume("run").summary["status"] == "finished"
    assert load_result("run").model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


@pytest.mark.parametrize("name", ["own_model.py", "widths.py"])
def test_models_are_not_built_by_an_edited_file(here: Path, name: str) -> None:
    resume("run", report=False)
    new_process("widths")
    edited(here / name)
    (here / "executed").unlink()
    said = f"error: {here / name} was edited since the run trained; undo the edit, or use the file as it is now with"
    commands = {
        "predict": ["predict", "run", "*.png", "--out", "predicted"],
        "export": ["export", "run", "--out", "model.safetensors"],
        "analyze": ["analyze", "run"],
        "record": ["analyze", "run", "--record", "2"],
    }
    for command in commands.values():
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 2, answer.output
        assert answer.stderr.startswith(said)
    for build in (
        lambda: load_result("run").model,
        lambda: load_result("run").best_model,
        lambda: open_run("run"),
    ):
        with pytest.raises(RunDirectoryError, match="was edited since the run trained"):
            build()
    assert not (here / "executed").exists()
    new_process("widths")
    answer = CliRunner().invoke(app, [*commands["export"], "--accept-changes", "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["notes"] == [f"accepted: {here / name} was edited since the run trained"]
    assert load_result("run", accept_changes=True).model is not None


def test_a_pretraining_continues_with_an_edited_file_when_accepted(here: Path) -> None:
    (here / "e.toml").write_text(tomli_w.dumps({**SETTINGS, "rounds": 1}))
    command = ["pretrain", "e.toml", "--out", "w.safetensors", "--no-report"]
    assert CliRunner().invoke(app, command).exit_code == 0
    weights = here / "w.safetensors"
    weights.unlink()
    new_process("widths")
    edited(here / "own_model.py")
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 2
    assert "own_model.py was edited since the run trained" in answer.stderr
    assert "--accept-changes" in answer.stderr
    assert not weights.exists()
    new_process("widths")
    answer = CliRunner().invoke(app, [*command, "--accept-changes"])
    assert answer.exit_code == 0, answer.output
    assert weights.exists()


def test_a_rule_does_not_build_the_model(here: Path) -> None:
    resume("run", report=False)
    edited(here / "own_rule.py")
    new_process("widths")
    assert load_result("run").export(here / "model.safetensors").exists()
    with pytest.raises(RunDirectoryError, match=r"own_rule\.py was edited since the run trained"):
        open_run("run")


def test_an_edit_that_this_process_has_not_read_is_not_passed_off_as_the_code_that_runs(here: Path) -> None:
    resume("run", report=False)
    edited(here / "own_model.py")
    with pytest.raises(RunFailed, match=r"own_model\.py was edited after this process had read it"):
        _ = load_result("run", accept_changes=True).model


def test_files_of_a_run_may_move_to_another_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume("run", report=False)
    new_process("widths")
    (here / "moved").mkdir()
    for name in ("own_model.py", "own_rule.py", "widths.py", "run"):
        (here / name).rename(here / "moved" / name)
    config = (here / "moved/run/config.toml").read_text()
    (here / "moved/run/config.toml").write_text(config.replace(str(here), str(here / "moved")))
    monkeypatch.chdir(here / "moved")
    assert open_run("run").built.parameters


def test_a_run_of_a_version_that_saved_no_digest_of_files_is_used_with_a_note(here: Path) -> None:
    run = RunDir(here / "run")
    for path in run.checkpoint_path.iterdir():
        forged(path, lambda content: content["about"].pop("own_files") and None)
    environment = run.read_environment()
    assert environment is not None
    del environment["own_files"]
    run.write_environment(environment)
    edited(here / "own_rule.py")
    told = Stops()
    resume("run", progress=told, report=False)
    assert any(
        "saved no digest of" in note and "own_rule.py: edits are not noticed" in note for note in told.notes
    )
    environment = run.read_environment()
    assert environment is not None
    assert {Path(name).name for name in environment.pop("own_files")} == {
        "own_model.py",
        "own_rule.py",
        "widths.py",
    }
    run.write_environment(environment)
    answer = CliRunner().invoke(app, ["export", "run", "--out", "model.safetensors", "--json"])
    (note,) = json.loads(answer.stdout)["notes"]
    assert note.startswith("an older version of fedlens saved no digest of ")
    assert "own_model.py" in note
    assert "own_rule.py" not in note
