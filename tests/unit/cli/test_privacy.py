"""`fedlens privacy`: what an experiment would spend, read without training."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app

RECIPE = """
rounds = 12
model = "linear"
local = {lr = 0.1, steps = 1}
engine = "inline"
select = {name = "uniform", clients_per_round = 4}
[data]
dataset = "digits"
partition = {name = "iid", clients = 20}
"""
TABLE = """[privacy]
clip = 0.1
noise_multiplier = 4.0
delta = 1e-3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "private.toml"
    path.write_text(RECIPE + TABLE)
    return path


@pytest.mark.usefixtures("few_orders")
def test_it_prints_the_guarantee_epsilon_by_round_and_the_noise_for_an_epsilon(recipe: Path) -> None:
    answer = CliRunner().invoke(app, ["privacy", str(recipe), "--epsilon", "2"])
    assert answer.exit_code == 0, answer.output
    lines = answer.output.splitlines()
    assert lines[0].startswith("After 12 rounds the model is (")
    assert "4 of 20 clients are drawn for each round, without replacement." in lines
    assert [line.split()[0] for line in lines if line[:1] == " "] == [
        "1",
        "2",
        "3",
        "5",
        "6",
        "8",
        "9",
        "11",
        "12",
    ]
    assert lines[-1].endswith("keeps the run within epsilon = 2")
    assert not list(recipe.parent.glob("runs"))


def test_it_answers_as_json(recipe: Path) -> None:
    answer = json.loads(CliRunner().invoke(app, ["privacy", str(recipe), "--json"]).stdout)
    assert answer["rounds"][-1]["rdp"] == answer["epsilon"]
    assert answer["rounds"][-1]["pld"] is None  # does not know sampling without replacement
    assert (answer["sampling"], answer["releases"]) == ("fixed", 12)


def test_an_experiment_without_the_table_promises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(RECIPE)
    answer = CliRunner().invoke(app, ["privacy", str(path)])
    assert answer.exit_code == 2
    assert "the experiment has no table [privacy]" in answer.output


def test_it_prints_what_each_client_would_spend(tmp_path: Path) -> None:
    path = tmp_path / "examples.toml"
    path.write_text(RECIPE + TABLE.replace("clip", 'unit = "example"\nclip').replace("4.0", "20.0"))
    batch = ["--set", 'local.batch_size="all"']  # q = 1, which PLD counts quickly
    answer = CliRunner().invoke(app, ["privacy", str(path), *batch])
    assert answer.exit_code == 0, answer.output
    lines = answer.output.splitlines()
    assert lines[0].startswith("All that client ")
    rows = [line.split() for line in lines if line[:1].isdigit() or line[:1] == " "]
    assert len(rows) == 8
    assert {(row[2], row[3]) for row in rows} == {("1", "12")}  # a step in each of 12 rounds
    assert lines[-1] == "and 12 clients with at most the last epsilon"
    solved = CliRunner().invoke(app, ["privacy", str(path), "--epsilon", "2", *batch])
    assert solved.output.splitlines()[-1].endswith("keeps the run within epsilon = 2")
