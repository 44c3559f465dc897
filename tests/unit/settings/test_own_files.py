"""Studies that name Python files of the user: an edit of one is a change of the study."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fedlens
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.results.rows import Results
from fedlens.run.session import Session
from fedlens.settings import own_files as module
from fedlens.settings.own_files import edited_files, own_files, refuse_edited_since
from fedlens.studies.carry_out import RunOptions, carry_out
from fedlens.studies.planned import DueRun
from fedlens.studies.progress import StudyProgress
from tests.unit.studies.study_kit import Heard, planned

MINE = """
from fedlens.algorithms.fedavg import fedavg
from parts.scales import scale

def mine(parts):
    {line}
    return fedavg(parts)
"""
STUDY = """
base = "digits"
set = {{ rounds = 1, model = "linear" }}
seeds = {seeds}
[methods.fedavg]
[methods.mine]
set = {{ "algorithm.name" = "mine.py:mine" }}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from . import names\n", encoding="utf-8")
    (tmp_path / "parts" / "names.py").write_text("import os, torch\n", encoding="utf-8")
    (tmp_path / "parts" / "scales.py").write_text("scale = 1\n", encoding="utf-8")
    (tmp_path / "other.py").write_text("", encoding="utf-8")
    edit(tmp_path, "pass")
    write(tmp_path, [0])
    yield tmp_path
    new_process()


def new_process() -> None:
    """Forgets what this process has read of the files."""
    module._named_by.cache_clear()
    module._sha256.cache_clear()


def edit(folder: Path, line: str) -> None:
    (folder / "mine.py").write_text(MINE.format(line=line), encoding="utf-8")
    new_process()


def write(folder: Path, seeds: list[int]) -> None:
    (folder / "s.toml").write_text(STUDY.format(seeds=seeds), encoding="utf-8")


def run(jobs: int = 0, accept: bool = False) -> dict[str, list[str]]:
    """The names of the run directories of the results, by method."""
    study = fedlens.Study.load("s.toml")
    info = study.run(jobs=jobs, report=False, accept_changes=accept).results.info
    return {name: [entry.run for entry in info.entries if entry.method == name] for name in info.methods}


def test_files_are_those_that_settings_name_and_the_modules_beside_them_that_they_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"algorithm": {"name": "mine.py:mine"}, "data": {"augment": ["none", {"name": "nowhere.py:x"}]}}
    listed = ["mine.py", "parts/__init__.py", "parts/names.py", "parts/scales.py"]
    assert list(own_files(named)) == listed
    monkeypatch.syspath_prepend(folder)
    assert list(own_files("parts.scales:scale")) == [str(folder / name) for name in listed[1:]]
    assert (
        own_files(["torch.nn:Linear", "fedlens.algorithms.fedavg:fedavg", "json:dumps", "no.such:x", "a: b"])
        == {}
    )


def test_an_edited_file_is_not_taken_for_another_one_of_its_name(folder: Path) -> None:
    edited = folder / "parts/scales.py"
    edited.write_text("scale = 2\n", encoding="utf-8")
    changed = own_files("mine.py:mine")["parts/scales.py"]
    edited.write_text("scale = 1\n", encoding="utf-8")
    new_process()
    before = {**own_files("mine.py:mine"), "elsewhere/scales.py": changed}
    edited.write_text("scale = 2\n", encoding="utf-8")
    assert list(edited_files(before, "mine.py:mine")) == ["parts/scales.py"]
    del before["parts/scales.py"]
    assert edited_files(before, "mine.py:mine") == {}  # it has moved here


@pytest.mark.parametrize("beside", [True, False])  # the current folder, or one of `sys.path`
def test_a_module_is_compared_with_its_packages_and_none_is_executed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    if not beside:
        monkeypatch.chdir(folder.parent)
        monkeypatch.syspath_prepend(folder)
    before = own_files("parts.scales:scale")
    executed = folder / "executed"
    (folder / "parts/__init__.py").write_text(f"open({str(executed)!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=r"parts/__init__\.py was edited since round 4"):
        refuse_edited_since("round 4", before, "parts.scales:scale", accept=False)
    assert not executed.exists()
    assert "parts" not in sys.modules


def test_an_edited_file_is_refused_and_only_the_runs_that_name_it_are_repeated(folder: Path) -> None:
    before = run()
    assert run() == before
    edit(folder, "number = 2")
    with pytest.raises(ConfigError) as error:
        run()
    assert str(error.value).splitlines()[1:-1] == [
        "Changed: the content of mine.py",
        "New: 1 run (mine: 1)",
        "No longer part of the study: 1 run (mine: 1).",
    ]
    after = run(accept=True)
    assert after["fedavg"] == before["fedavg"]
    assert after["mine"] != before["mine"]
    edit(folder, "pass")  # undone
    write(folder, [0, 1])
    assert run(accept=True)["mine"][:1] == before["mine"]


def test_an_edit_of_a_module_that_the_file_imports_counts_too(folder: Path) -> None:
    before = run()
    (folder / "other.py").write_text("x = 1\n", encoding="utf-8")
    new_process()
    assert run() == before
    (folder / "parts" / "scales.py").write_text("scale = 2\n", encoding="utf-8")
    new_process()
    with pytest.raises(ConfigError, match=r"Changed: the content of parts/scales\.py"):
        run()


def test_a_file_whose_runs_failed_may_be_repaired(folder: Path) -> None:
    edit(folder, "raise ValueError('no luck')")
    fedlens.Study.load("s.toml").run(jobs=1, report=False)
    failed = Results.read(Path("studies/s")).lines
    assert [line.status for line in failed.values()] == ["finished", "failed"]
    edit(folder, "pass")
    assert len(run(jobs=1)["mine"]) == 1
    lines = Results.read(Path("studies/s")).lines
    assert [line.status for line in lines.values()] == ["finished", "finished"]


def test_a_run_fails_in_a_process_that_reads_another_content_than_the_plan(folder: Path) -> None:
    due = DueRun(replace(planned(0), files={"mine.py": "0" * 64}))
    line = carry_out(due, RunOptions(folder / "runs"), Session(), StudyProgress())
    assert line.status == "failed"
    assert "mine.py was edited after the study started" in str(line.reason)


def test_runs_are_counted_without_those_of_an_earlier_plan(folder: Path) -> None:
    class Counted(Heard):
        def runs_due(self, due: int, done: int, total: int) -> None:
            counts.append((due, done, total))

    counts: list[tuple[int, int, int]] = []
    run()
    edit(folder, "number = 2")
    study = fedlens.Study.load("s.toml")
    study.run(jobs=0, report=False, accept_changes=True, progress=Counted())
    assert counts == [(1, 1, 2)]
