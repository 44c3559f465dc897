"""`fedlens audit`: an audit as text and as JSON."""

import json
from pathlib import Path

from typer.testing import CliRunner

from fedlens.cli.main import app
from tests.unit.cli.test_privacy import RECIPE, TABLE


def test_it_prints_the_rates_and_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "private.toml"
    path.write_text(RECIPE.replace("rounds = 12", "rounds = 1") + TABLE + 'noise = "seeded"\n')
    small = ["--set", "data.partition.clients=4"]
    answer = CliRunner().invoke(app, ["audit", str(path), "--runs", "100", *small])
    assert answer.exit_code == 0, answer.output
    assert "No violation of more than 0." in answer.stdout
    assert "the claim holds" not in answer.stdout
    assert "False negative rate, canary present: 0." in answer.stdout
    found = json.loads(CliRunner().invoke(app, ["audit", str(path), "--one-run", "--json", *small]).stdout)
    assert (found["canaries"], found["guesses"], found["violation"]) == (4, 2, False)
    assert "If all were right it would be" in found["verdict"][0]


def test_an_experiment_without_a_promise_and_a_contradiction_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(RECIPE)
    answer = CliRunner().invoke(app, ["audit", str(path)])
    assert answer.exit_code == 2
    assert "the experiment has no table [privacy]" in answer.output
    answer = CliRunner().invoke(app, ["audit", str(path), "--one-run", "--runs", "200"])
    assert "--one-run and --runs exclude each other" in answer.output
