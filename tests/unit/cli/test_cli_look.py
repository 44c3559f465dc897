from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens import __version__
from fedlens.cli.list import REGISTRIES
from fedlens.cli.main import app
from fedlens.settings import config_source as sources
from tests.unit.results.fake_run import make_run

Process = Callable[..., subprocess.CompletedProcess[str]]
runner = CliRunner()
HEAVY = ("torch", "torchvision", "numpy", "plotly", "pandas", "sklearn", "pydantic")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], HEAVY),
        (["run", "--help"], HEAVY[:-1]),
        (["bench", "--help"], HEAVY[:-1]),
        (["bench", "linear", "--help"], HEAVY[:-1]),
        (["sweep", "--help"], HEAVY[:-1]),
        (["reproduce", "--list"], HEAVY[:-1]),
        (["--version"], HEAVY),
        (["list", "recipes"], HEAVY[:-1]),
        *(
            (["list", str(kind)], ("torch", "torchvision", "plotly", "pandas", "sklearn"))
            for kind in REGISTRIES
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_looking_around_imports_nothing_heavy(
    arguments: list[str],
    heavy: tuple[str, ...],
    imported: Callable[[list[str], Path], set[str]],
    tmp_path: Path,
) -> None:
    assert not imported(arguments, tmp_path) & {*heavy}


def test_version() -> None:
    answer = runner.invoke(app, ["--version"])
    assert (answer.exit_code, answer.stdout) == (0, f"fedlens {__version__}\n")


@pytest.mark.parametrize("kind", list(REGISTRIES))
def test_list_shows_every_name_with_its_line(kind: str) -> None:
    answer = runner.invoke(app, ["list", kind])
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    assert lines
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_list_partitions_names_dirichlet() -> None:
    assert "dirichlet" in runner.invoke(app, ["list", "partitions"]).stdout


def test_recipes_are_listed_with_their_first_comment_and_shown_verbatim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '# Two classes a client [bold]and[/bold] no more.\n# Second line.\n\nname = "digits"  # ü\n'
    (tmp_path / "mnist").mkdir()
    (tmp_path / "digits.toml").write_text(text, encoding="utf-8")
    (tmp_path / "mnist" / "iid.toml").write_text('name = "x"\n', encoding="utf-8")
    monkeypatch.setattr(sources, "_RECIPES", tmp_path)
    listed = runner.invoke(app, ["list", "recipes"]).stdout
    assert listed == "digits     Two classes a client [bold]and[/bold] no more.\nmnist/iid\n"
    assert runner.invoke(app, ["show", "digits"]).stdout == text
    unknown = runner.invoke(app, ["show", "digit"])
    assert unknown.exit_code == 2
    assert "did you mean 'digits'" in unknown.stderr


def test_compare_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    runs = [
        str(make_run(tmp_path, name=name, algorithm=name, rounds=2)) for name in ("fedavg", "centralized")
    ]
    page = tmp_path / "out" / "page.html"
    answer = runner.invoke(app, ["compare", *runs, "--html", str(page)])
    assert answer.exit_code == 0, answer.output
    head, first, *_ = answer.stdout.splitlines()
    assert head.split()[:4] == ["run", "algorithm", "partition", "dataset"]
    assert "relative" in head
    assert "100.0 %" in first
    assert page.is_file()


def test_compare_as_json_is_json_and_nothing_else(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path, name=name, rounds=2)) for name in ("a", "b")]
    answer = runner.invoke(app, ["compare", *runs, "--json", "--html", str(tmp_path / "page.html")])
    assert [row["run"] for row in json.loads(answer.stdout)] == ["a", "b"]
    assert "page.html" in answer.stderr


def test_report_says_where_the_page_is(tmp_path: Path) -> None:
    run = make_run(tmp_path, rounds=2)
    answer = runner.invoke(app, ["report", str(run)])
    assert (answer.exit_code, answer.stdout) == (0, f"{run / 'report.html'}\n")


def test_report_opens_the_page_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    run = make_run(tmp_path, rounds=2)
    runner.invoke(app, ["report", str(run)])
    assert opened == []
    runner.invoke(app, ["report", str(run), "--open"])
    assert opened == [(run / "report.html").resolve().as_uri()]


def test_columns_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedlens.cli.display.output import print_columns

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    print_columns([("fedavg", "a line [of] text " * 5)], ("name", "about"))
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "[of]" in out
    assert len(out.splitlines()) > 2


def test_the_entry_point_is_called_fedlens(fedlens_process: Process) -> None:
    assert "Usage: fedlens" in fedlens_process("--help").stdout
