"""Runs whose output is lost, and runs that are told to stop again and again: none ends with a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.run_kit import experiment, lives, outcome, summary

RUN = ["run", "run.toml", "--out"]
LONG = ["--set", "checkpoint.seconds=1000"]  # so that the save is made as the run stops


def life(out: str, *more: str, **how: Any) -> dict[str, Any]:
    return {"args": [*RUN, out, *more], "out": out, **how}


PLAN = {
    "undisturbed": life("undisturbed", "--json"),
    "twenty SIGINT": life("int", *LONG, lines=2, after=0.0, signal="SIGINT", times=20),
    "twenty SIGTERM": life("term", *LONG, lines=2, after=0.0, signal="SIGTERM", times=20),
    "SIGHUP": life("hup", *LONG, lines=2, after=0.0, signal="SIGHUP"),
    "SIGHUP under nohup": life("nohup", lines=2, after=0.0, signal="SIGHUP", times=5, ignored="SIGHUP"),
    "resume": {"args": ["resume", "int", "--json"], "out": "int"},
    "closed": life("closed", stdout="closed"),
    "full": life("full", stdout="full"),
    "broken pipe": life("pipe", stdout="broken pipe"),
    "json, closed": life("jclosed", "--json", stdout="closed"),
    "json, full": life("jfull", "--json", stdout="full"),
    "json, broken pipe": life("jpipe", "--json", stdout="broken pipe"),
    "page": life("page", "--json", "--quiet", page="a directory"),
    "list, full": {"args": ["list", "models"], "stdout": "full"},
    "list, broken pipe": {"args": ["list", "models"], "stdout": "broken pipe"},
    "compare, broken pipe": {"args": ["compare", "undisturbed"], "stdout": "broken pipe"},
    "show, broken pipe": {"args": ["show", "digits"], "stdout": "broken pipe"},
    "help, full": {"args": ["--help"], "stdout": "full"},
    "error, broken pipe": {"args": ["compare", "nowhere", "--json"], "stdout": "broken pipe"},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("lives")
    experiment(folder, rounds=4)
    with lives(folder) as play:
        yield folder, dict(zip(PLAN, play(list(PLAN.values())), strict=True))


def test_no_life_ends_with_a_traceback(played: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    for name, ended in played[1].items():
        assert "Traceback" not in ended["err"] + ended["out"], (name, ended["err"])
        assert "unexpected" not in ended["err"], (name, ended["err"])


@pytest.mark.parametrize(
    ("name", "out"), [("twenty SIGINT", "int"), ("twenty SIGTERM", "term"), ("SIGHUP", "hup")]
)
def test_however_often_it_is_told_to_stop_it_saves_and_says_one_sentence(
    played: tuple[Path, dict[str, dict[str, Any]]], name: str, out: str
) -> None:
    ended = played[1][name]
    assert (ended["code"], ended["err"]) == (130, f"interrupted: resume with: fedlens resume {out}\n")
    assert list((played[0] / out / "checkpoint").iterdir())
    assert name == "twenty SIGINT" or summary(played[0] / out)["status"] == "interrupted"


def test_it_is_resumed_to_the_same_bits(played: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, ended = played
    assert ended["resume"]["code"] == 0, ended["resume"]["err"]
    resumed, whole = outcome(folder / "int"), outcome(folder / "undisturbed")
    assert (
        resumed.pop("checkpoints")[-1] == whole.pop("checkpoints")[-1]
    )  # an earlier one is of the interruption
    assert resumed == whole


def test_a_hang_up_that_is_ignored_stops_nothing(played: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, ended = played
    assert ended["SIGHUP under nohup"]["code"] == 0
    assert outcome(folder / "nohup") == outcome(folder / "undisturbed")


FULL = "standard output cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("name", "out", "code", "said"),
    [
        ("closed", "closed", 0, ""),
        (
            "full",
            "full",
            1,
            f"warning: {FULL}; the run continues without output\nerror: {FULL}; the run is in full.\n",
        ),
        (
            "broken pipe",
            "pipe",
            0,
            "warning: standard output cannot be written: Broken pipe; the run continues without output\n",
        ),
        ("json, closed", "jclosed", 1, "error: standard output cannot be written: it is closed.\n"),
        ("json, full", "jfull", 1, f"error: {FULL}.\n"),
        ("json, broken pipe", "jpipe", 141, ""),
    ],
)
def test_a_run_whose_output_is_lost_trains_to_its_end(
    played: tuple[Path, dict[str, dict[str, Any]]], name: str, out: str, code: int, said: str
) -> None:
    folder, ended = played
    assert ended[name]["code"] == code, ended[name]["err"]
    problems = [
        line
        for line in ended[name]["err"].splitlines(keepends=True)
        if line.startswith(("error", "warning", "interrupted"))
    ]
    assert "".join(problems) == said
    assert outcome(folder / out) == outcome(folder / "undisturbed")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("list, full", 1, f"error: {FULL}.\n"),
        ("help, full", 1, f"error: {FULL}.\n"),
        ("list, broken pipe", 141, ""),
        ("compare, broken pipe", 141, ""),
        ("show, broken pipe", 141, ""),
        ("error, broken pipe", 2, "error: the directory does not exist (nowhere).\n"),
    ],
)
def test_every_command_ends_in_order(
    played: tuple[Path, dict[str, dict[str, Any]]], name: str, code: int, said: str
) -> None:
    assert (played[1][name]["code"], played[1][name]["err"]) == (code, said)


def test_a_result_page_that_could_not_be_written_is_said_three_times(
    played: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, ended = played[0], played[1]["page"]
    assert ended["code"] == 0
    assert ended["err"].startswith("warning: the result page could not be written: report.html could not be")
    sentence = ended["err"].removeprefix("warning: ").rstrip("\n")
    assert json.loads(ended["out"])["notes"] == [sentence]
    assert summary(folder / "page")["notes"] == [sentence]
