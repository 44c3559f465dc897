from __future__ import annotations

import json
import re
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
        (["run", "digit"], "unknown recipe 'digit'"),
        (["run", "{recipe}", "--set", "local.lr"], "'local.lr' is not key=value (--set)"),
        (
            ["run", "{recipe}", "--set", "client=[proximal]"],
            "[proximal] is neither a table nor a list of TOML: ",
        ),
        (["run", "nowhere.toml"], "the file nowhere.toml does not exist"),
        (["report", "nowhere"], "the directory does not exist (nowhere)"),
        (["compare", "nowhere"], "the directory does not exist (nowhere)"),
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


@pytest.mark.parametrize(
    ("arguments", "what", "where", "hint"),
    [
        (["run", "digit"], "unknown recipe 'digit'", None, "did you mean 'digits'"),
        (["compare", "nowhere"], "the directory does not exist", "nowhere", None),
        (["resume", "nowhere"], "the directory does not exist", "nowhere", None),
        (["partition", "show", "nowhere"], "the partition file does not exist", "nowhere", None),
        (["data", "info", "digit"], "unknown dataset 'digit'", None, "did you mean 'digits'"),
        (
            ["run", "digits", "--rounds", "many"],
            "Invalid value for '--rounds'",
            "fedlens run",
            "Try 'fedlens run --help'",
        ),
        (["lst"], "No such command 'lst'", "fedlens", "Try 'fedlens --help'"),
        (
            ["plot"],
            "No such command 'plot'. 'fedlens partition plot' draws",
            "fedlens",
            "Try 'fedlens --help'",
        ),
    ],
)
def test_with_json_an_error_is_an_object_beside_its_sentence(
    arguments: list[str], what: str, where: str | None, hint: str | None, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there are no runs that a hint would name
    answer = runner.invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 2
    said = json.loads(answer.stdout)
    assert said["error"].pop("what").startswith(what)
    assert said == {"status": "error", "error": {"where": where, "hint": hint}, "exit_code": 2}
    assert what.split("'")[0] in answer.stderr


def test_with_json_the_unexpected_is_an_object_too(api: Api, recipe: Path) -> None:
    api("breaks at once")
    answer = runner.invoke(app, ["run", str(recipe), "--json"])
    assert answer.exit_code == 1
    said = json.loads(answer.stdout)
    assert (said["status"], said["exit_code"]) == ("error", 1)
    assert said["error"]["what"] == "unexpected error: ZeroDivisionError: division by zero"
    assert said["error"]["where"].startswith("fake_api.py, line ")
    assert "error: unexpected error: ZeroDivisionError" in answer.stderr


def test_a_benchmarks_json_file_is_no_request_for_json_errors() -> None:
    answer = runner.invoke(app, ["bench", "profile", "digits", "--json", "file.json", "--rounds", "many"])
    assert (answer.exit_code, answer.stdout) == (2, "")


def test_control_characters_of_names_are_escaped(api: Api, tmp_path: Path) -> None:
    api("finishes")
    name = "a\x1b[31m\x9b\r\x07\u202eb.toml"
    answer = runner.invoke(app, ["run", name])
    assert answer.stderr.startswith(r"error: the file a\x1b[31m\x9b\r\x07\u202eb.toml does not exist")
    answer = runner.invoke(app, ["run", name, "--json"])
    assert not set(answer.stdout) & set("\x1b\x9b\r\x07\u202e")
    assert name in json.loads(answer.stdout)["error"]["what"]
    answer = runner.invoke(app, ["run", "digits", "--\x1b[31m"])
    assert r"--\x1b[31m" in answer.stderr


def test_the_unexpected_is_one_sentence_and_exit_code_1(api: Api, recipe: Path) -> None:
    api("breaks at once")
    answer = runner.invoke(app, ["run", str(recipe)])
    assert answer.exit_code == 1
    assert re.fullmatch(
        r"error: unexpected error: ZeroDivisionError: division by zero \(fake_api\.py, line \d+\)\. "
        r"Run it again with --debug to see the traceback\.\n",
        answer.stderr,
    )


RULE = """
from fedlens.rules import ClientRule, ServerRule


def gap() -> ClientRule:
    return ClientRule(name="gap", server_rules={"gap": ServerRule(after=after)})


def after(state, update, ctx):
    return state, {}["gap"]
"""


def test_an_error_in_a_server_rule_names_the_line_of_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rule.py").write_text(RULE, encoding="utf-8")
    options = "--rounds 1 --engine inline --no-report --set client=rule.py:gap"
    answer = runner.invoke(app, ["run", "digits", *options.split()])
    assert answer.exit_code == 1
    assert answer.stderr.splitlines()[-1].startswith(
        "error: unexpected error: KeyError: 'gap' (rule.py, line 10). Run it again with --debug"
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
    assert answer.stderr.splitlines()[0].startswith(f"error: the file {name} does not exist")
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


LONG = ("a" * 6000, "a/" * 3000 + "b")


@pytest.mark.parametrize(
    "command",
    [
        "run digits --set model.weights=run:LONG --out out",
        "run digits --set model.weights=LONG.pt --out out",
        "run LONG",
        "resume LONG",
        "report LONG",
        "compare LONG",
        "predict LONG image.png --out out",
        "export LONG --out model.onnx",
        "analyze LONG",
        "sweep LONG.toml",
        "cost digits --out LONG",
        "pretrain digits --out LONG.safetensors",
        "data check LONG",
        "partition show LONG",
    ],
)
@pytest.mark.parametrize("long", LONG, ids=["name", "path"])
def test_a_path_of_6000_characters_is_one_sentence(
    command: str, long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = runner.invoke(app, command.replace("LONG", long).split())
    assert answer.exit_code in (1, 2)
    assert answer.stderr.startswith("error: ")
    assert answer.stderr.count("\n") == 1
    assert "unexpected" not in answer.stderr
    assert not any(tmp_path.iterdir())
