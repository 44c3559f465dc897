from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from tests.unit.cli import fake_api
from tests.unit.cli.conftest import command

Api = Callable[[str], list[Any]]
Process = Callable[..., subprocess.CompletedProcess[str]]
runner = CliRunner()


def test_run_hands_everything_to_the_experiment(api: Api, recipe: Path) -> None:
    calls = api("finishes")
    options = "--set local.lr=0.1 --set model.name=linear --rounds 5 --seed 7 --engine inline"
    options += " --out o --data-dir d --download --no-report"
    answer = runner.invoke(app, ["run", str(recipe), *options.split()])
    assert answer.exit_code == 0, answer.output
    settings = ["local.lr=0.1", "model.name=linear", "rounds=5", "seed=7", "engine.name=inline"]
    assert calls == [
        ("load", str(recipe), settings),
        ("run", Path("o"), {"data_dir": Path("d"), "download": True, "report": False}),
    ]


def test_run_changes_nothing_that_was_not_asked_for(api: Api, recipe: Path) -> None:
    calls = api("finishes")
    assert runner.invoke(app, ["run", str(recipe)]).exit_code == 0
    assert calls == [
        ("load", str(recipe), []),
        ("run", None, {"data_dir": None, "download": False, "report": True}),
    ]


def test_resume_hands_the_directory_on(api: Api) -> None:
    calls = api("finishes")
    assert runner.invoke(app, ["resume", "somewhere", "--data-dir", "d", "--no-report"]).exit_code == 0
    options = {"data_dir": Path("d"), "report": False, "accept_changes": False}
    assert calls == [("resume", Path("somewhere"), options)]


def test_without_a_terminal_a_round_is_a_line(api: Api, recipe: Path) -> None:
    api("finishes")
    out = runner.invoke(app, ["run", str(recipe)]).stdout.splitlines()
    rounds = [text for text in out if text.startswith("round ")]
    assert [text.split()[1] for text in rounds] == ["0/3", "1/3", "2/3", "3/3"]
    assert rounds[0] == "round 0/3  accuracy 0.1  loss 2.5"
    assert rounds[3] == "round 3/3  accuracy 0.316  loss 1.99  local 1.46  300 images/s  1.5 s"
    assert "note: the last checkpoint is [damaged]: the one before was taken" in out
    assert "finished: accuracy 31.6 % on test after round 3; best 31.6 % in round 3, chosen on test" in out
    assert out[-1].startswith("result page: ")
    assert Path(out[-1].removeprefix("result page: ")).is_file()


def test_quiet_prints_where_the_result_is_and_nothing_else(api: Api, recipe: Path) -> None:
    api("finishes")
    answer = runner.invoke(app, ["run", str(recipe), "--quiet"])
    own = [text for text in answer.stdout.splitlines() if text != "a user's own print"]
    assert len(own) == 1
    assert Path(own[0]).name == "report.html"
    assert Path(own[0]).is_file()
    assert answer.stderr == ""


@pytest.mark.parametrize("verb", ["run", pytest.param("resume", marks=pytest.mark.nightly)])
def test_json_has_standard_output_to_itself(fedlens_process: Process, recipe: Path, verb: str) -> None:
    given = {"run": str(recipe), "resume": "somewhere"}[verb]
    done = fedlens_process(verb, given, "--json", ending="finishes")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    for text in ("round 3/3", "a user's own print", "a worker's print", "result page"):
        assert text in done.stderr


def test_json_and_quiet_leave_standard_error_to_others(fedlens_process: Process, recipe: Path) -> None:
    done = fedlens_process("run", str(recipe), "--json", "--quiet", ending="finishes")
    assert json.loads(done.stdout)["rounds_done"] == 3
    assert set(done.stderr.splitlines()) == {"a user's own print", "a worker's print"}


def test_a_failed_run_exits_1_with_its_summary(
    fedlens_process: Process, recipe: Path, tmp_path: Path
) -> None:
    done = fedlens_process("run", str(recipe), "--json", ending="fails")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    error = {"what": "the loss is NaN everywhere", "where": None, "hint": "lower local.lr"}
    assert (summary["status"], summary["error"], summary["exit_code"]) == ("failed", error, 1)
    assert summary["rounds_done"] == 3
    (written,) = tmp_path.glob("runs/digits/*/summary.json")
    assert json.loads(written.read_text())["error"] == "the loss is NaN everywhere"
    assert done.stderr.splitlines()[-1] == "error: the loss is NaN everywhere; lower local.lr."
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "ending", [pytest.param("breaks", marks=pytest.mark.nightly), "breaks after an interruption"]
)
def test_a_run_that_broke_has_a_summary_too(fedlens_process: Process, recipe: Path, ending: str) -> None:
    done = fedlens_process("run", str(recipe), "--json", ending=ending)
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["error"].pop("where").startswith("fake_api.py, line ")
    error = {
        "what": "unexpected error: ZeroDivisionError: division by zero",
        "hint": "Run it again with --debug to see the traceback",
    }
    assert (summary["status"], summary["error"], summary["exit_code"]) == ("failed", error, 1)
    assert "unexpected" in done.stderr.splitlines()[-1]


def test_an_interrupted_run_says_how_to_go_on(fedlens_process: Process, recipe: Path) -> None:
    done = fedlens_process("run", str(recipe), ending="is interrupted")
    assert done.returncode == 130
    directory = Path("runs/digits/20261120-101500")
    assert done.stderr.splitlines()[-1] == f"interrupted: resume with: fedlens resume {directory}"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_interrupt(recipe: Path, tmp_path: Path, sent: signal.Signals) -> None:
    argv, env = command(["run", str(recipe), "--json"], "waits")
    with subprocess.Popen(
        argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(text == "waiting\n" for text in process.stderr)
        process.send_signal(sent)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    summary = json.loads(out)
    assert (summary["status"], summary["exit_code"]) == ("interrupted", 130)
    assert summary["error"]["hint"] == f"resume with: fedlens resume {summary['directory']}"
    assert "fedlens resume runs/digits/" in err
    assert "Traceback" not in err


def test_without_a_page_the_directory_is_the_result(
    api: Api, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api("finishes")
    monkeypatch.setattr(fake_api, "write_report", lambda directory: None)
    answer = runner.invoke(app, ["run", str(recipe), "--quiet"])
    assert answer.exit_code == 0
    assert (Path(answer.stdout.splitlines()[-1]) / "config.toml").is_file()
    for name, write in {
        "none": lambda directory: None,
        "a folder": lambda d: (d / "report.html").mkdir(),
    }.items():
        monkeypatch.setattr(fake_api, "write_report", write)
        answer = runner.invoke(app, ["run", str(recipe), "--out", name])
        label, directory = answer.stdout.splitlines()[-1].split(": ")
        assert (label, (Path(directory) / "config.toml").is_file()) == ("run directory", True)


def test_on_a_terminal_one_line_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from fedlens.cli.display.run_display import RunDisplay

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, highlight=False, markup=False)
    seen = RunDisplay(console)
    plan = {"name": "a", "rounds": 10, "clients": 4, "clients_per_round": 2, "directory": "d", "model": "m"}
    seen.started(plan)
    seen.round_done({"round": 0, "test_accuracy": 0.1, "test_loss": 2.3, "elapsed": 0.0})
    seen.round_done({"round": 1, "examples": 500, "seconds": 2.0, "elapsed": 2.0, "local_loss": None})
    seen.close()
    seen.close()
    last = screen.getvalue()
    assert "round 1/10" in last
    assert "18 s left  accuracy 10.0 % after round 0  loss 2.3  250 images/s" in last
