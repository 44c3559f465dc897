"""A run directory from somebody else: no link, FIFO or device in it makes fedlens write, delete or wait elsewhere."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens import resume
from fedlens.base.errors import FedlensError
from fedlens.cli.main import app
from fedlens.files import jsonl
from fedlens.pages.run_page import write_report
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from tests.faults.run_kit import outcome
from tests.faults.test_run_directories import here, stopped  # noqa: F401

MINE = b"my thesis\n"
# The temporary names that could be guessed before they were random.
GUESSED = [
    ".report.html.tmp",
    ".summary.json.tmp",
    ".environment.json.tmp",
    ".metrics.jsonl.tmp",
    ".clients.jsonl.tmp",
    ".model.safetensors.tmp",
    ".best.safetensors.tmp",
    "partition.npz.part",
    "states/.writing",
]


@pytest.fixture
def mine(here: Path) -> Path:  # noqa: F811
    path = here / "mine.txt"
    path.write_bytes(MINE)
    return path


def plant(run: Path, name: str, target: Path) -> Path:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


@pytest.mark.report_page
def test_links_of_every_name_that_a_run_could_take_are_not_followed(here: Path, mine: Path) -> None:  # noqa: F811
    written = ["report.html", "model.safetensors", "best.safetensors"]
    for name in GUESSED + written:
        plant(here / "run", name, mine)
    write_report(here / "run")
    resume("run")
    assert mine.read_bytes() == MINE
    assert outcome(here / "run") == outcome(here / "ref")
    for name in written:
        assert not (here / "run" / name).is_symlink()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "clients.jsonl", "checkpoint", "states"])
def test_a_link_that_would_be_written_through_is_refused(here: Path, mine: Path, name: str) -> None:  # noqa: F811
    target = mine
    if name in ("checkpoint", "states"):
        target = here / "elsewhere"
        target.mkdir()
        (target / "round-000001").mkdir()
        (target / f"{'0' * 64}.safetensors").write_bytes(MINE)
    elif name.endswith("jsonl"):
        mine.write_bytes((here / "run" / name).read_bytes())
    before = mine.read_bytes()
    path = plant(here / "run", name, target)
    answer = CliRunner().invoke(app, ["resume", "run"])
    assert answer.exit_code == 2
    assert f"error: {name} is a symbolic link (run/{name})" in answer.stderr
    assert mine.read_bytes() == before
    assert path.is_symlink()
    if target.is_dir():
        assert sorted(entry.name for entry in target.iterdir()) == [f"{'0' * 64}.safetensors", "round-000001"]


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "config.toml", "environment.json", "summary.json"]
)
def test_a_pipe_is_refused_and_never_waited_for(here: Path, name: str) -> None:  # noqa: F811
    (here / "run" / name).unlink(missing_ok=True)
    os.mkfifo(here / "run" / name)
    answer = CliRunner().invoke(app, ["resume", "run"])
    assert answer.exit_code == 2
    assert name in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("planted", ["a pipe", "a link to a device"])
def test_a_page_waits_for_no_pipe_and_no_device(here: Path, planted: str) -> None:  # noqa: F811
    path = here / "ref/clients.jsonl"
    path.unlink()
    if planted == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    answer = CliRunner().invoke(app, ["report", "ref"])
    assert answer.exit_code == 2
    assert re.match(r"error: clients\.jsonl is (not a regular file|a symbolic link) \(ref/", answer.stderr)


def test_analyses_are_not_written_through_a_link(here: Path, mine: Path) -> None:  # noqa: F811
    (here / "elsewhere").mkdir()
    (here / "elsewhere/dynamics.jsonl").write_bytes(MINE)
    plant(here / "ref", "analysis", here / "elsewhere")
    answer = CliRunner().invoke(app, ["analyze", "ref", "dynamics", "--record", "1"])
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error: analysis is a symbolic link (ref/analysis); ")
    assert [path.name for path in (here / "elsewhere").iterdir()] == ["dynamics.jsonl"]
    assert (here / "elsewhere/dynamics.jsonl").read_bytes() == MINE


def test_a_picture_replaces_a_link(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from fedlens.results.figures.picture import save, style

    (tmp_path / "mine.txt").write_bytes(MINE)
    (tmp_path / "curves.svg").symlink_to("mine.txt")
    with style():
        save(Figure(), tmp_path / "curves.svg")
    assert (tmp_path / "mine.txt").read_bytes() == MINE
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.timeout(60)
@pytest.mark.report_page
def test_a_page_does_not_wait_for_a_pipe_in_a_folder_beside_it(here: Path) -> None:  # noqa: F811
    (here / "run/config.toml").unlink()
    os.mkfifo(here / "run/config.toml")
    assert write_report(here / "ref").is_file()


def test_hard_links_are_neither_locked_nor_appended_to(here: Path, mine: Path) -> None:  # noqa: F811
    (here / "run/.lock").unlink()
    os.link(mine, here / "run/.lock")
    with pytest.raises(FedlensError, match=r"^\.lock is not a lock file of fedlens"):
        resume("run")
    assert mine.read_bytes() == MINE
    (here / "run/.lock").unlink()
    os.link(here / "run/metrics.jsonl", here / "snapshot")
    before = (here / "snapshot").read_bytes()
    with pytest.raises(FedlensError, match=r"^metrics\.jsonl is a hard link"):
        jsonl.append(RunDir(here / "run").metrics_path, [{"round": 5}])
    resume("run")  # drops the last line, which gives the run a file of its own
    assert (here / "snapshot").read_bytes() == before


def test_a_checkpoint_that_is_a_link_is_passed_over_and_its_target_kept(here: Path) -> None:  # noqa: F811
    last = max((here / "run/checkpoint").iterdir())
    last.rename(here / "elsewhere")
    last.symlink_to(here / "elsewhere")
    notes = checkpoint.load_latest(here / "run/checkpoint")
    assert notes is not None
    assert notes.skipped == ["the checkpoint of round 4 is corrupt (it is a symbolic link) and was skipped"]
    resume("run")
    assert sorted(entry.name for entry in (here / "elsewhere").iterdir()) == [
        "manifest.json",
        "tensors.safetensors",
    ]
    assert outcome(here / "run") == outcome(here / "ref")


def test_what_killed_processes_left_is_swept_and_a_file_in_use_is_not(here: Path) -> None:  # noqa: F811
    import fcntl

    left = [
        here / "run/.summary.json.0123456789abcdef.tmp",
        here / "run/.partition.npz.0123456789abcdef.tmp",
        here / "run/.tmpAbC123",
        here / "run/checkpoint/round-000009.0123456789abcdef.saving",
    ]
    for path in left[:-1]:
        path.touch()
    left[-1].mkdir()
    busy = here / "run/.report.html.fedcba9876543210.tmp"
    with busy.open("w") as file:  # as another process has it that writes the page
        fcntl.flock(file, fcntl.LOCK_EX)
        resume("run")
    assert busy.exists()
    assert not any(path.exists() for path in left)


def test_temporary_names_are_random_and_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlens.files import atomic_files

    names: list[str] = []
    create = atomic_files.create

    def recording(path: Path, mode: int) -> int:
        names.append(path.name)
        return create(path, mode)

    monkeypatch.setattr(atomic_files, "create", recording)
    for _ in range(2):
        atomic_files.write_atomically(tmp_path / "summary.json", b"{}")
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"\.summary\.json\.[0-9a-f]{16}\.tmp", name) for name in names)
    (tmp_path / "there").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        create(tmp_path / "there")
