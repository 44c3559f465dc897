"""`fedlens audit`: an audit as text, as JSON and as a picture."""

import json
from pathlib import Path

from typer.testing import CliRunner

from fedlens.cli.main import app
from tests.unit.cli.test_privacy import RECIPE, TABLE


def test_it_prints_the_rates_and_a_verdict_and_draws_them(tmp_path: Path) -> None:
    path, picture = tmp_path / "private.toml", tmp_path / "audit.svg"
    path.write_text(RECIPE.replace("rounds = 12", "rounds = 1") + TABLE + 'noise = "seeded"\n')
    small = ["--set", "data.partition.clients=4"]
    answer = CliRunner().invoke(app, ["audit", str(path), "--runs", "100", "--picture", str(picture), *small])
    assert answer.exit_code == 0, answer.output
    assert "No violation of more than 0." in answer.stdout
    assert "the claim holds" not in answer.stdout
    assert "false negative" in answer.stdout
    assert picture.read_bytes()
    found = json.loads(CliRunner().invoke(app, ["audit", str(path), "--one-run", "--json", *small]).stdout)
    assert (found["canaries"], found["guesses"], found["violation"]) == (4, 2, False)
    assert "none could be" in found["verdict"][0]


def test_an_experiment_without_a_promise_and_a_contradiction_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(RECIPE)
    answer = CliRunner().invoke(app, ["audit", str(path)])
    assert answer.exit_code == 2
    assert "the experiment has no table [privacy]" in answer.output
    answer = CliRunner().invoke(app, ["audit", str(path), "--one-run", "--runs", "200"])
    assert "--one-run and --runs exclude each other" in answer.output
