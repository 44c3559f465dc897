"""`fedlens.Study` and `fedlens sweep`: from a file to results, and back from the results alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedlens
from fedlens.algorithms.fedavg import fedavg
from fedlens.base.errors import ConfigError
from fedlens.cli.main import app
from fedlens.studies.study import StudyResult
from tests.unit.studies.study_kit import Heard, without_clock

BASE = {
    "rounds": 3,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {
        "dataset": "digits",
        "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5},
        "normalize": "unit",
    },
}
FILE = """
base = "base.toml"
seeds = [0, 1]
[grid]
"data.partition.alpha" = [0.3, 3.0]
[methods.fedavg]
[methods.fedprox]
set = { "algorithm.name" = "fedprox", "algorithm.mu" = 0.1 }
"""
BASE_FILE = """
rounds = 2
model = "linear"
local = { lr = 0.1 }
data = { dataset = "digits", partition = { name = "dirichlet", clients = 4, alpha = 1.0 }, normalize = "unit" }
"""


def written(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    (folder / "s.toml").write_text(FILE, encoding="utf-8")
    (folder / "base.toml").write_text(BASE_FILE, encoding="utf-8")
    patch.chdir(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a study of eight runs."""
    return written(tmp_path, monkeypatch)


def sweep(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sweep", "s.toml", "--jobs", "0", *arguments])


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study of `folder` after its runs, which wrote no page."""
    with pytest.MonkeyPatch.context() as patch:
        made = written(tmp_path_factory.mktemp("swept"), patch)
        done = sweep("--no-report")
    assert done.exit_code == 0, done.output
    assert "results: studies/s\n" in done.output  # no page was written
    return made / "studies"


@pytest.fixture
def made(folder: Path, swept: Path) -> Path:
    """The folder of the finished study in the current folder."""
    return shutil.copytree(swept, folder / "studies") / "s"


def test_a_study_in_python_gives_tidy_rows(tmp_path: Path) -> None:
    heard = Heard()
    study = fedlens.Study(base=BASE, seeds=[0, 1], grid={"local.lr": [0.1, 0.3]})
    result = study.run(tmp_path / "s", jobs=0, progress=heard, report=False)
    assert [run.key for run in study.plan().runs] == heard.ended
    assert [row["seed"] for row in result.runs] == [0, 1, 0, 1]
    frame = result.cells.to_pandas()
    assert list(frame["local.lr"]) == [0.1, 0.3]
    assert list(frame["n"]) == [2, 2]
    assert set(result.results.lines) == {run.digest for run in study.plan().runs}
    again = Heard()
    study.run(tmp_path / "s", jobs=0, progress=again, report=False)
    assert again.ended == []


def test_halving_and_tuning_give_the_same_by_any_number_of_jobs_and_after_a_stop(tmp_path: Path) -> None:
    settings = {
        "base": BASE,
        "seeds": [0],
        "set": {"rounds": 4},
        "methods": {"a": {"grid": {"local.lr": [0.01, 0.03, 0.1, 0.3]}}},
        "tune": {"seeds": [5]},
        "stop": {"halving": 2, "first": 2},
    }
    straight = fedlens.Study(**settings).run(tmp_path / "straight", jobs=0, report=False)
    lines = without_clock(straight.directory)
    assert sorted(line["rounds"] for line in lines) == [2, 2, 4, 4, 4]

    class Stop(Heard):
        def run_ended(self, run: Any, line: Any) -> None:
            super().run_ended(run, line)
            raise KeyboardInterrupt

    for _ in range(7):  # one run further each: four to the rung, two from there, one of the results
        with pytest.raises(KeyboardInterrupt):
            fedlens.Study(**settings).run(tmp_path / "cut", jobs=0, report=False, progress=Stop())
    fedlens.Study(**settings).run(tmp_path / "cut", jobs=0, report=False)
    assert without_clock(tmp_path / "cut") == lines
    for name in ("study.json", "study.toml"):  # but for the folder in the command
        text = (tmp_path / "cut" / name).read_text().replace(f"{tmp_path / 'cut'}", f"{straight.directory}")
        assert text == (straight.directory / name).read_text()


def test_the_command_runs_a_study_and_writes_its_files(folder: Path) -> None:
    done = sweep()
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "8 runs."
    assert "They train on" in lines[1]
    assert lines[-1] == "results: studies/s/study.html"
    assert sum(line.startswith("[") for line in lines) == 8
    made = folder / "studies" / "s"
    assert (made / "study.toml").read_bytes() == (folder / "s.toml").read_bytes()
    names = {path.name for path in made.iterdir()}
    assert names >= {
        "study.json",
        "results.jsonl",
        "runs.csv",
        "cells.csv",
        "cells.tex",
        "tables",
        "study.html",
    }
    runs = made / "runs"
    assert len(list(runs.iterdir())) == 8
    assert not list(runs.glob("*/report.html"))


def test_results_alone_are_enough_to_write_the_files_again(folder: Path, made: Path) -> None:
    assert not (made / "cells.csv").exists()
    shutil.rmtree(made / "runs")
    (folder / "base.toml").unlink()
    done = sweep("--render")
    assert done.exit_code == 0, done.output
    assert "fedprox" in (made / "cells.csv").read_text("utf-8")
    assert not (made / "runs").exists()


def test_files_of_tables_that_the_study_no_longer_asks_for_are_removed_unless_they_were_edited(
    folder: Path, made: Path
) -> None:
    text = (folder / "s.toml").read_text("utf-8")
    tables = [f'[[tables]]\nkind = "summary"\nname = "{name}"\n' for name in ("one", "two", "three")]
    (folder / "s.toml").write_text(f"{text}\n{''.join(tables)}")
    assert sweep().exit_code == 0
    (made / "tables" / "mine.tex").write_text("mine")
    (made / "tables" / "two.tex").write_text("edited")
    assert json.loads((made / "outputs.json").read_text("utf-8")).keys() >= {
        "tables/one.csv",
        "tables/two.tex",
    }
    (folder / "s.toml").write_text(f"{text}\n{tables[2]}")
    for _ in range(2):
        assert sweep().exit_code == 0
        assert {path.name for path in (made / "tables").iterdir()} == {
            "mine.tex", "two.tex", "three.tex", "three.csv"
        }  # fmt: skip
    assert (made / "tables" / "two.tex").read_text("utf-8") == "edited"


def test_a_dry_run_starts_nothing(folder: Path) -> None:
    done = sweep("--dry-run")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("8 runs.")
    assert not (folder / "studies").exists()
    told = json.loads(sweep("--dry-run", "--json").stdout)
    assert (told["left"], told["runs"]) == (8, {"final": 8})


def test_other_seeds_and_settings_are_kept_in_the_copy_of_the_study(folder: Path) -> None:
    done = sweep("--seeds", "3-4,7", "--set", "rounds=1", "--json", "--no-report")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {row["seed"] for row in told["runs"]} == {3, 4, 7}
    assert {row["rounds"] for row in told["runs"]} == {1}
    copy = (folder / "studies" / "s" / "study.toml").read_text("utf-8")
    assert "rounds = 1" in copy
    assert fedlens.Study.load(folder / "studies" / "s" / "study.toml")._source.settings.seeds == [3, 4, 7]


def test_a_changed_study_is_refused_until_it_is_accepted(folder: Path, made: Path) -> None:
    (folder / "s.toml").write_text(FILE.replace("0.1", "0.2"), encoding="utf-8")
    before = (made / "study.toml").read_bytes()
    refused = sweep("--no-report")
    assert refused.exit_code == 2
    assert "has changed since the runs" in refused.output
    assert (made / "study.toml").read_bytes() == before
    accepted = sweep("--no-report", "--accept-changes")
    assert accepted.exit_code == 0, accepted.output
    assert len(StudyResult(made).runs) == 8


@pytest.mark.usefixtures("made")
def test_a_changed_study_is_refused_before_its_cost_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said = sweep("--dry-run", "--seeds", "0-2")
    assert said.exit_code == 0
    assert "has changed since the runs were made; --accept-changes continues the study" in said.output
    assert "Changed: seeds: 3 instead of 2" in said.output
    monkeypatch.setattr(fedlens.Study, "estimate", lambda *given, **more: pytest.fail("measured"))
    refused = sweep("--no-report", "--seeds", "0-2")
    assert refused.exit_code == 2
    assert "New: 4 runs" in refused.output


def test_failed_runs_are_named_and_end_with_code_1(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from fedlens.algorithms.fedavg import fedavg\ndef broken(parts):\n    raise ValueError('no luck')\n",
        encoding="utf-8",
    )
    text = FILE.replace(
        '"algorithm.name" = "fedprox", "algorithm.mu" = 0.1', '"algorithm.name" = "own.py:broken"'
    )
    (folder / "s.toml").write_text(text, encoding="utf-8")
    done = sweep()
    assert done.exit_code == 1, done.output
    assert "4 of 8 runs failed; the same command repeats them" in done.output
    assert "no luck" in done.output
    assert StudyResult(folder / "studies" / "s").failed[0].status == "failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "1.5"], "invalid value for --seeds: '1.5'"),
        (["--engine", "inline"], "invalid value for --engine: 'inline'"),
        (["--address", "auto"], "add --engine ray"),
        (["--scale", "smoke"], "no scale 'smoke'"),
        (["--set", "local.lrr=1"], "lrr"),
    ],
)
def test_a_wrong_request_ends_with_code_2_and_writes_nothing(
    folder: Path, arguments: list[str], said: str
) -> None:
    done = sweep(*arguments)
    assert done.exit_code == 2
    assert said in done.output.replace("\n", " ")
    assert not (folder / "studies").exists()


def test_a_negative_number_of_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 0"):
        fedlens.Study(base=BASE).run(jobs=-1)


@pytest.mark.parametrize("seeds", [range(2), (0, 1), {1, 0}, np.arange(2)])
def test_a_study_takes_values_as_python_has_them(tmp_path: Path, seeds: Any) -> None:
    given = {"seeds": seeds, "grid": {"local.lr": np.array([0.1, 0.3])}, "target": np.float64(0.5)}
    result = fedlens.Study(base=BASE, set={"rounds": np.int64(1)}, **given).run(
        tmp_path, jobs=0, report=False
    )
    assert [(row["local.lr"], row["seed"]) for row in result.runs] == [(0.1, 0), (0.1, 1), (0.3, 0), (0.3, 1)]
    assert (
        fedlens.Study.load(tmp_path / "study.toml").plan().runs[0].digest
        == result.results.info.entries[0].digest
    )


@pytest.mark.usefixtures("quick_jobs")
def test_a_study_takes_functions_and_writes_their_names(tmp_path: Path) -> None:
    methods = {"fedavg": {}, "mine": {"set": {"algorithm": averaged, "local.lr": 0.2}}}
    result = fedlens.Study(base=BASE, set={"rounds": 1}, methods=methods).run(tmp_path, jobs=1, report=False)
    assert result.failed == []
    assert 'algorithm = "tests.unit.studies.test_study:averaged"' in (tmp_path / "study.toml").read_text(
        "utf-8"
    )


def averaged(parts: Any) -> Any:
    """An algorithm that is given as a function."""
    return fedavg(parts)
