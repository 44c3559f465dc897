from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app

Api = Callable[[str], list[Any]]
Process = Callable[..., subprocess.CompletedProcess[str]]
runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst"], "'list'"),
        (["run"], "RECIPE_OR_FILE"),
        (["run", "digits", "--round", "3"], "--rounds"),
        (["run", "digits", "--rounds", "many"], "--rounds"),
        (["list", "animals"], "partitions"),
        (["compare"], "DIR"),
    ],
)
def test_a_wrong_command_line_exits_2_and_names_what_is_right(arguments: list[str], said: str) -> None:
    answer = runner.invoke(app, arguments)
    assert answer.exit_code == 2
    assert said in answer.stderr
    assert answer.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "digit"], "there is no recipe 'digit'"),
        (["run", "{recipe}", "--set", "local.lr"], "'local.lr' is not key=value (--set)"),
        (
            ["run", "{recipe}", "--set", "client=[proximal]"],
            "[proximal] is neither a table nor a list of TOML: ",
        ),
        (["run", "nowhere.toml"], "the file nowhere.toml is not there"),
        (["report", "nowhere"], "there is no such directory (nowhere)"),
        (["compare", "nowhere"], "there is no such directory (nowhere)"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exit_code_2(
    api: Api, recipe: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    api("finishes")
    answer = runner.invoke(app, [argument.format(recipe=recipe) for argument in arguments])
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error: " + said)
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_refused_request_prints_no_json(fedlens_process: Process) -> None:
    done = fedlens_process("run", "digit", "--json", ending="finishes")
    assert (done.returncode, done.stdout) == (2, "")


def test_the_unexpected_is_one_sentence_and_exit_code_1(api: Api, recipe: Path) -> None:
    api("breaks at once")
    answer = runner.invoke(app, ["run", str(recipe)])
    assert answer.exit_code == 1
    assert answer.stderr == (
        "error: unexpected error: ZeroDivisionError: division by zero. "
        "Run it again with --debug to see the traceback.\n"
    )


@pytest.mark.parametrize(
    ("ending", "code", "kind"), [("breaks at once", 1, "ZeroDivisionError"), ("fails", 1, "RunFailed")]
)
def test_debug_shows_where_it_came_from(api: Api, recipe: Path, ending: str, code: int, kind: str) -> None:
    api(ending)
    answer = runner.invoke(app, ["run", str(recipe), "--debug"])
    assert answer.exit_code == code
    assert "Traceback" in answer.stderr
    assert kind in answer.stderr
    assert "--debug" not in answer.stderr


def test_an_error_is_not_wrapped_and_not_read_as_markup(api: Api) -> None:
    api("finishes")
    name = "[red]" + "x" * 200 + ".toml"
    answer = runner.invoke(app, ["run", name])
    assert answer.stderr.splitlines()[0].startswith(f"error: the file {name} is not there")
    assert len(answer.stderr.splitlines()) == 1


def test_an_interruption_before_the_start_leaves_nothing(
    api: Api, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api("finishes")

    def stop(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.unit.cli.fake_api.read_source", stop)
    answer = runner.invoke(app, ["run", str(recipe)])
    assert answer.exit_code == 130
    assert answer.stderr == "interrupted: nothing was started\n"
