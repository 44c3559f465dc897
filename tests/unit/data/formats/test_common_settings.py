from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fedlens.base.registry import read_settings
from fedlens.cli.main import app
from fedlens.data.formats.registry import FORMATS
from tests.unit.data.pictures import pixels, write

runner = CliRunner()


def checked(format: str, **given: Any) -> dict[str, Any]:
    needed = {"classes": ["a", "b"]} if format == "mask-folder" else {}
    return read_settings(FORMATS[format].reader(), {**needed, **given}, "data.dataset")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("format", FORMATS)
def test_the_folder_is_found_from_any_directory(format: str, here: Path) -> None:
    assert checked(format, path="scans/all")["path"] == str(here / "scans" / "all")
    assert checked(format, path="scans/../all")["path"] == str(here / "all")
    assert checked(format, path="/somewhere")["path"] == "/somewhere"


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_that_is_seen_from_here_too_and_one_in_the_folder_stays(format: str, here: Path) -> None:
    (here / "scans").mkdir()
    (here / "scans" / "inner.csv").touch()
    (here / "outer.csv").touch()
    assert checked(format, path="scans", table="outer.csv")["table"] == str(here / "outer.csv")
    assert checked(format, path="scans", table="scans/inner.csv")["table"] == str(here / "scans/inner.csv")
    assert checked(format, path="scans", table="inner.csv")["table"] == "inner.csv"
    assert checked(format, path="scans")["table"] is None


def test_the_home_folder_is_made_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "who.csv").touch()
    settings = checked("csv", path="~/scans", table="~/who.csv")
    assert (settings["path"], settings["table"]) == (str(here / "scans"), str(here / "who.csv"))


def write_run(table: str) -> None:
    for at in range(12):
        write(Path("scans") / f"{at:02}.png", pixels(at))
    lines = [f"{at:02}.png,{('cat', 'dog')[at % 2]},h{at // 6}" for at in range(12)]
    Path(table).write_text("\n".join(["path,label,hospital", *lines]) + "\n")
    settings = {
        "path": "scans",
        "table": table.removeprefix("scans/"),
        "client_column": "hospital",
        "size": 8,
    }
    data = {"dataset": {"name": "image-folder", **settings}, "partition": {"name": "natural"}}
    run = {"name": "own", "rounds": 2, "data": data, "model": {"name": "linear"}, "local": {"lr": 0.1}}
    Path("own.toml").write_text(tomli_w.dumps({**run, "select": {"name": "all"}}))


@pytest.mark.parametrize("table", ["outer.csv", "scans/inner.csv"])
def test_a_run_goes_on_from_another_directory(table: str, here: Path) -> None:
    write_run(table)
    answer = runner.invoke(app, ["run", "own.toml", "--out", "out", "--quiet"])
    assert answer.exit_code == 0, answer.output
    stored = tomllib.loads(Path("out/config.toml").read_text())["data"]["dataset"]
    assert stored["path"] == str(here / "scans")
    (here / "elsewhere").mkdir()
    os.chdir(here / "elsewhere")
    answer = runner.invoke(app, ["run", "../out/config.toml", "--rounds", "1", "--out", "again", "--quiet"])
    assert answer.exit_code == 0, answer.output
    first, again = (
        [json.loads(line) for line in Path(file).read_text().splitlines()]
        for file in ("../out/metrics.jsonl", "again/metrics.jsonl")
    )
    assert again[0]["test_loss"] == first[0]["test_loss"]
    answer = runner.invoke(app, ["resume", "../out"])
    assert "the folder does not exist" not in answer.output
    assert answer.exit_code == 0, answer.output
