"""A study that tunes, on real training: stopped at any round and continued, it chooses the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlens import Study
from fedlens.results.cells import chosen_values, edges
from fedlens.results.rows import Results
from fedlens.studies.planned import PlannedRun
from fedlens.studies.progress import StudyProgress
from tests.unit.studies.study_kit import without_clock

STUDY: dict[str, Any] = {
    "name": "tuned",
    "base": {
        "rounds": 6,
        "model": "linear",
        "local": {"lr": 0.1, "steps": 2},
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 3}},
        "checkpoint": {"seconds": 0.0},
    },
    "seeds": [0],
    "grid": {"local.lr": [0.01, 0.1, 1e6]},
    "tune": {"refit": False},
    "stop": {"halving": 2, "first": 3},
}


class _Interrupt(StudyProgress):
    """Ctrl-C after a number of rounds, over all runs."""

    def __init__(self, after: int) -> None:
        self.left = after

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    Study(**STUDY).run(folder, jobs=0, report=False)
    return folder


def test_halving_and_divergence_end_runs_early_and_the_chosen_one_is_trained_to_its_end(whole: Path) -> None:
    results = Results.read(whole)
    by_rate: dict[float, Any] = {}
    for entry in results.info.entries:
        by_rate[entry.point["local.lr"]] = results.lines[entry.digest]
    assert {rate: (line.status, line.rounds) for rate, line in by_rate.items() if rate != 0.1} == {
        0.01: ("stopped", 3),
        1e6: ("failed", 3),
    }
    assert (by_rate[0.1].status, by_rate[0.1].rounds) == ("finished", 6)
    assert by_rate[1e6].reason.startswith("diverged in round 3: The ")
    assert chosen_values(results, "fedavg", {}) == {"local.lr": 0.1}
    assert edges(results, "fedavg", {}) == set()


@pytest.mark.parametrize("after", [1, 5, 8, 12])
def test_interrupted_at_any_round_it_gives_the_same_lines(tmp_path: Path, whole: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        Study(**STUDY).run(tmp_path, jobs=0, report=False, progress=_Interrupt(after))
    Study(**STUDY).run(tmp_path, jobs=0, report=False)
    assert without_clock(tmp_path) == without_clock(whole)
    mine, other = (json.loads((folder / "study.json").read_text()) for folder in (tmp_path, whole))
    assert {**mine, "command": other["command"]} == other  # which names the folder


def test_run_again_it_changes_nothing(tmp_path: Path, whole: Path) -> None:
    before = without_clock(whole)
    Study(**STUDY).run(whole, jobs=0, report=False)
    assert without_clock(whole) == before


def test_tuning_runs_hold_out_validation_data_and_final_runs_train_on_all_with_refit(tmp_path: Path) -> None:
    Study(**{**STUDY, "tune": {"seeds": [9], "share": 0.2}, "stop": {"diverged": True}}).run(
        tmp_path, jobs=0, report=False
    )
    results = Results.read(tmp_path)
    columns = {
        entry.role: "validation_accuracy" in results.lines[entry.digest].curve
        for entry in results.info.entries
        if results.lines[entry.digest].status == "finished"
    }
    assert columns == {"tune": True, "final": False}


@pytest.mark.usefixtures("quick_jobs")
def test_two_jobs_make_the_same_lines_as_one_process(tmp_path: Path, whole: Path) -> None:
    Study(**STUDY).run(tmp_path, jobs=2, report=False)
    assert without_clock(tmp_path) == without_clock(whole)
