"""Which run directories paths, folders and patterns name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens.base.errors import RunDirectoryError
from fedlens.cli.main import app
from fedlens.results.run import find_runs, read_runs
from tests.unit.results.fake_run import make_run


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / "runs", name=name, run_id=at, rounds=1)
        for name, at in (("a", "20261120-1"), ("a", "20261121-1"), ("b", "20261120-2"))
    ]


def test_a_folder_gives_every_run_below_it_sorted(tmp_path: Path, three: list[Path]) -> None:
    assert find_runs([tmp_path / "runs"]) == three
    assert find_runs([str(tmp_path / "runs" / "b")]) == three[2:]


def test_a_pattern_gives_its_matches_sorted_and_passes_over_files(tmp_path: Path, three: list[Path]) -> None:
    (tmp_path / "runs" / "a" / "20261120-page.html").write_text("no run")
    assert find_runs([f"{tmp_path}/runs/*/20261120*"]) == [three[0], three[2]]


def test_a_run_named_twice_is_there_once_in_the_order_of_the_arguments(
    tmp_path: Path, three: list[Path]
) -> None:
    assert find_runs([three[2], tmp_path / "runs", three[0]]) == [three[2], three[0], three[1]]


def test_hidden_folders_are_passed_over(tmp_path: Path, three: list[Path]) -> None:
    three[0].parent.rename(tmp_path / "runs" / ".a")
    assert find_runs([tmp_path / "runs"]) == three[2:]


def test_what_is_inside_a_run_is_no_run_and_links_below_a_folder_are_not_followed(
    tmp_path: Path, three: list[Path]
) -> None:
    inside = three[0] / "checkpoint"
    inside.mkdir()
    (inside / "config.toml").write_text("")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs", target_is_directory=True)
    assert find_runs([tmp_path / "runs"]) == three


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "the directory does not exist .*nowhere"),
        ("empty", "no run found in .*empty"),
        ("run*/x*", "no directory matches the pattern .*x"),
        ("file", "file is a file, not a run directory"),
    ],
)
def test_where_there_is_no_run_the_path_is_named(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=said) as error:
        find_runs([f"{tmp_path}/{path}"])
    assert path == "nowhere" or "'runs/*/2026*'" in str(error.value)


def test_a_run_that_cannot_be_read_is_named_and_skipped(tmp_path: Path, three: list[Path]) -> None:
    (three[1] / "config.toml").write_text("no toml [")
    runs, skipped = read_runs([tmp_path / "runs"])
    assert [run.path for run in runs] == [three[0], three[2]]
    assert len(skipped) == 1
    assert skipped[0].startswith(f"skipped {three[1]}: ")
    said = CliRunner().invoke(app, ["compare", str(tmp_path / "runs"), "--each"])
    assert said.exit_code == 0
    assert f"skipped {three[1]}" in said.stderr
    with pytest.raises(RunDirectoryError):
        read_runs([three[1]])
