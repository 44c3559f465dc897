"""Which run a server goes on with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fedlens.base.errors import RunDirectoryError
from fedlens.run.rundir import RunDir
from fedlens.server.serve_record import ServeRecord, run_to_serve

NEW = ServeRecord.new({"seed": 1}, b"root", "seed = 1\n")
OTHER = replace(NEW, experiment="ab" * 32)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, record: ServeRecord, status: str | None = None) -> RunDir:
    run = RunDir.create(None, "wards", name)
    record.started(run)
    if status:
        run.write_summary({"status": status})
    return run


def test_the_latest_unfinished_run_of_the_experiment_goes_on() -> None:
    made("1", NEW)
    latest = made("2", replace(NEW, run="two"), "interrupted")
    made("3", OTHER)
    made("4", NEW, "finished")
    made("5", replace(NEW, root="another"))
    run, record = run_to_serve(None, "wards", NEW)
    assert run == latest
    assert (record.run, record.attempt) == ("two", 1)


def test_without_one_a_new_run_begins() -> None:
    made("1", OTHER)
    made("2", NEW, "finished")
    run, record = run_to_serve(None, "wards", NEW)
    assert record == NEW
    assert run.path == Path("runs/wards") / NEW.run  # people see one id, here and at the sites


def test_a_directory_with_another_name_has_the_id_that_sites_see(tmp_path: Path) -> None:
    run, record = run_to_serve(tmp_path / "own", "wards", NEW)
    record.started(run)
    assert (run.path.name, run.run_id) == ("own", NEW.run)


def test_each_run_has_an_identity_of_its_own() -> None:
    again = ServeRecord.new({"seed": 1}, b"root", "seed = 1\n")
    assert again.same(NEW)
    assert again.run != NEW.run


def test_an_attempt_is_on_the_disk_when_it_begins() -> None:
    run = made("1", NEW)
    assert ServeRecord.read(run) == replace(NEW, attempt=1)
    assert replace(NEW, attempt=1).started(run).attempt == 2
    assert ServeRecord.read(run) == replace(NEW, attempt=2)


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").touch()
    with pytest.raises(RunDirectoryError, match="not empty"):
        run_to_serve(tmp_path / "own", "wards", NEW)


def test_a_resumed_run_keeps_its_terms_until_others_are_given(tmp_path: Path) -> None:
    first = replace(NEW, until="2027-01-31", agreement="0a" * 32)
    made("1", first)
    assert run_to_serve(None, "wards", NEW)[1] == replace(first, attempt=1)
    later = replace(NEW, until="2027-03-31", keep_days=90)
    run, record = run_to_serve(None, "wards", later)
    assert (record.until, record.agreement, record.keep_days) == ("2027-03-31", "0a" * 32, 90)
    record.started(run)
    assert run_to_serve(run.path, "wards", NEW)[1].until == "2027-03-31"
    old = asdict(NEW)
    for name in ("until", "agreement", "keep_days"):
        del old[name]
    run.serve_path.write_text(json.dumps(old))  # of a version without terms
    assert ServeRecord.read(run) == NEW
