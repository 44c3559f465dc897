"""Runs commands in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fedlens.cli.main import app

runner = CliRunner()


def ran(*arguments: str | Path, typed: str | None = None) -> str:
    """What a command that succeeds prints on standard output."""
    answer = runner.invoke(app, list(map(str, arguments)), input=typed)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def refused(*arguments: str | Path, typed: str | None = None) -> str:
    """The sentence of a command that fails."""
    answer = runner.invoke(app, list(map(str, arguments)), input=typed)
    assert answer.exit_code in (1, 2), answer.output
    assert answer.stderr.startswith("error: ")
    assert "unexpected" not in answer.stderr
    return answer.stderr.removeprefix("error: ").strip()
