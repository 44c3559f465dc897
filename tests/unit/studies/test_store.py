"""The folder of a study: its order of lines, what is carried out again, and run directories that were edited."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedlens.base.errors import RunDirectoryError
from fedlens.results.rows import LINES
from fedlens.studies.store import StudyStore, working
from tests.unit.studies.study_kit import FAILING, FixedPlan, Heard, carried_out, planned, without_clock

PLAN = FixedPlan([planned(0), planned(1), FAILING])


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried")
    carried_out(folder, PLAN)
    return folder


@pytest.fixture
def study(tmp_path: Path, carried: Path) -> Path:
    """A study of three runs of which one failed."""
    return shutil.copytree(carried, tmp_path, dirs_exist_ok=True)


def edited(path: Path, before: str, after: str) -> None:
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after), "utf-8")


def test_what_is_finished_is_skipped_and_what_failed_is_tried_again(study: Path) -> None:
    before, heard = (study / LINES).read_bytes(), Heard()
    carried_out(study, PLAN, progress=heard)
    assert heard.ended == [FAILING.key]
    assert heard.notes == ["1 failed run is tried again"]
    assert (study / LINES).read_bytes() == before


def test_lost_and_cut_lines_come_back_from_the_run_directories(study: Path) -> None:
    before = (study / LINES).read_bytes()
    (study / LINES).unlink()
    heard = Heard()
    carried_out(study, PLAN, progress=heard)
    assert (study / LINES).read_bytes() == before  # to the byte: no run has trained again
    assert heard.rounds == []
    (study / LINES).write_bytes(before[: len(before) * 2 // 3])
    carried_out(study, PLAN)
    assert (study / LINES).read_bytes() == before


def test_a_line_after_one_that_was_cut_off_is_not_lost(study: Path) -> None:
    content = (study / LINES).read_bytes()
    (study / LINES).write_bytes(content[:-5])
    store = StudyStore(study)
    with store.lock():
        kept = set(store.lines)
        store.add(replace(next(iter(store.lines.values())), digest="new"))
    assert set(StudyStore(study).lines) == {*kept, "new"}


def test_lines_of_runs_outside_the_plan_stay_at_the_end(study: Path) -> None:
    carried_out(study, FixedPlan([planned(3, rounds=1), planned(2, rounds=1)]))
    carried_out(study, FixedPlan([planned(1)]))
    others = sorted([planned(0).directory, planned(2, rounds=1).directory, planned(3, rounds=1).directory])
    assert [line["run"] for line in without_clock(study)] == [planned(1).directory, *others]


def test_results_alone_are_enough_for_what_is_finished(study: Path) -> None:
    shutil.rmtree(study / "runs")
    heard = Heard()
    carried_out(study, PLAN, progress=heard)
    assert heard.ended == [FAILING.key]


@pytest.mark.parametrize("lost", [False, True])
def test_an_edited_config_is_refused_with_the_key(study: Path, lost: bool) -> None:
    """Whether or not the line of the run is known."""
    if lost:
        (study / LINES).unlink()
    run = study / "runs" / planned(0).directory
    edited(run / "config.toml", "lr = 0.1", "lr = 0.4")
    with pytest.raises(RunDirectoryError, match=r"config.toml of a run was edited.*delete the directory"):
        carried_out(study, PLAN)


def test_an_edited_config_of_an_unfinished_run_is_refused_with_the_values(study: Path) -> None:
    longer = FixedPlan([planned(0, rounds=6)])
    carried_out(study, FixedPlan(longer.runs, rung=2))
    (study / LINES).unlink()
    run = study / "runs" / longer.runs[0].directory
    for name in ("planned.json", "summary.json"):  # as after a kill in the first moments
        (run / name).unlink()
    edited(run / "config.toml", "lr = 0.1", "lr = 0.4")
    with pytest.raises(RunDirectoryError, match=r"holds another run: local.lr is 0.4 instead of 0.1"):
        carried_out(study, longer)


def test_edited_metrics_of_a_finished_run_are_refused(study: Path) -> None:
    path = study / "runs" / planned(1).directory / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.", b"1.", 1))
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl of a finished run was edited"):
        carried_out(study, PLAN)


def test_a_directory_with_another_run_is_refused(study: Path) -> None:
    ours, other = (study / "runs" / planned(seed).directory for seed in (0, 1))
    (study / LINES).unlink()
    shutil.rmtree(ours)
    shutil.copytree(other, ours)
    with pytest.raises(RunDirectoryError, match=r"holds another run"):
        carried_out(study, PLAN)


def test_files_in_the_place_of_a_run_directory_are_refused(study: Path) -> None:
    run = study / "runs" / planned(0).directory
    (run / "config.toml").unlink()
    with pytest.raises(RunDirectoryError, match=r"files but no config.toml.*move it away"):
        carried_out(study, PLAN)


def test_a_deleted_directory_of_an_unfinished_run_is_run_again(tmp_path: Path) -> None:
    plan = FixedPlan([planned(0)])
    straight, deleted = tmp_path / "straight", tmp_path / "deleted"
    carried_out(straight, plan)

    class Once(FixedPlan):
        def due(self, lines):  # type: ignore[no-untyped-def]
            return super().due(lines) if not lines else []

    carried_out(deleted, Once(plan.runs, rung=2))
    shutil.rmtree(deleted / "runs")
    carried_out(deleted, FixedPlan(plan.runs, rung=2))
    assert without_clock(deleted) == without_clock(straight)


def test_a_folder_that_another_process_works_on_is_refused(tmp_path: Path) -> None:
    store = StudyStore(tmp_path)
    with (
        store.lock(),
        pytest.raises(RunDirectoryError, match="in use by process"),
        StudyStore(tmp_path).lock(),
    ):
        pass


def test_workers_of_a_killed_study_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlens.studies.store._PATIENCE", 0.2)
    with (
        working(tmp_path),
        pytest.raises(RunDirectoryError, match="still write"),
        StudyStore(tmp_path).lock(),
    ):
        pass
    with StudyStore(tmp_path).lock():
        pass


def test_a_failing_run_is_a_line_with_its_reason_and_no_path_of_the_folder(study: Path) -> None:
    (line,) = [line for line in without_clock(study) if line["status"] == "failed"]
    assert "nowhere.safetensors" in line["reason"]
    assert str(study) not in json.dumps(line)


def test_the_folder_of_a_study_can_be_read_without_torch(study: Path) -> None:
    code = f"import sys; from pathlib import Path; from fedlens.results.rows import Results; \
assert len(Results.read(Path({str(study)!r})).lines) == 3; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
