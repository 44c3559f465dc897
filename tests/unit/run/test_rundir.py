"""The run directory: made once, read at any moment, written whole or not at all."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.base.errors import FedlensError, RunDirectoryError, RunFailed
from fedlens.files import atomic_files as files
from fedlens.files import jsonl
from fedlens.run import rundir
from fedlens.run.rundir import RunDir, plain


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run", "digits", None)
    made.write_config('name = "digits"\nseed = 3\n')
    return made


def test_by_default_a_run_lies_below_runs_with_time_and_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RunDir.create(None, "digits", None), RunDir.create(None, "digits", None)
    assert first.path != second.path
    assert re.fullmatch(r"runs/digits/\d{8}-\d{6}-[0-9a-f]{4}", first.path.as_posix())
    assert first.run_id == first.path.name
    assert RunDir.create(None, "digits", "mine").path == Path("runs/digits/mine")


def test_a_taken_id_is_drawn_again_and_a_given_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = iter(["a", "a", "b"])
    monkeypatch.setattr(rundir, "new_run_id", lambda: next(ids))
    assert [RunDir.create(None, "digits", None).run_id for _ in range(2)] == ["a", "b"]
    Path("runs/digits/a/config.toml").write_text("")
    with pytest.raises(RunDirectoryError, match=r"already contains a run \(runs/digits/a\); resume it"):
        RunDir.create(None, "digits", "a")
    Path("runs/digits/a/summary.json").write_text('{"status": "failed"}')
    with pytest.raises(
        RunDirectoryError, match=r"which failed .*; to begin again move or delete it, else resume it"
    ):
        RunDir.create(None, "digits", "a")


def test_a_named_directory_is_taken_exactly_and_may_exist_empty(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path / "a" / "b", "digits", None).path == tmp_path / "a" / "b"
    assert RunDir.create(tmp_path / "a" / "b", "any/thing", None).path == tmp_path / "a" / "b"
    with RunDir(tmp_path / "a" / "b").lock():
        pass
    assert RunDir.create(tmp_path / "a" / "b", "digits", None).run_id == "b"


def test_a_directory_with_a_run_is_never_overwritten(run: RunDir) -> None:
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(RunDirectoryError) as caught:
        RunDir.create(run.path, "digits", None)
    assert f"fedlens resume {run.path}" in str(caught.value)
    assert "--out" in str(caught.value)
    assert caught.value.exit_code == 2
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_directory_with_anything_else_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"not empty.*--out"):
        RunDir.create(tmp_path, "digits", None)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        with pytest.raises(RunDirectoryError, match="a file has the path of the run directory") as caught:
            RunDir.create(path, "digits", None)
        assert caught.value.where == str(path)


def test_where_nothing_can_be_made_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot be created: File name too long"):
        RunDir.create(tmp_path / ("x" * 300), "digits", None)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_is_not_writable_is_said(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    tmp_path.chmod(0o500)
    (tmp_path / "own").chmod(0o500)
    try:
        with pytest.raises(RunDirectoryError, match="cannot be made: Permission denied"):
            RunDir.create(tmp_path / "new", "digits", None)
        with pytest.raises(RunDirectoryError, match="is not writable"):
            RunDir.create(tmp_path / "own", "digits", None)
    finally:
        tmp_path.chmod(0o700)


def test_an_empty_directory_that_is_not_writable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(RunDirectoryError, match="is not writable"):
        RunDir.create(tmp_path, "digits", None)


@pytest.mark.parametrize("name", ["a/b", "a\\b", "", ".", "..", "a\nb", "a\0b", "x" * 201])
def test_a_name_that_is_no_plain_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ((None, name, None), (None, "digits", name)):
        with pytest.raises(RunDirectoryError, match="cannot be a directory's name"):
            RunDir.create(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_open_takes_a_run_and_gives_its_latest_neighbour_otherwise(tmp_path: Path) -> None:
    for age, name in ((2, "old"), (1, "new"), (3, "zzz-oldest")):
        made = RunDir.create(tmp_path / "digits" / name, "digits", None)
        made.write_config("")
        os.utime(made.config_path, (1000 - age, 1000 - age))
    (tmp_path / "digits" / ".hidden").mkdir()
    assert RunDir.open(tmp_path / "digits" / "old").run_id == "old"
    for path in (tmp_path / "digits", tmp_path):
        with pytest.raises(
            RunDirectoryError, match=r"no config\.toml.*the latest of 3 runs below it is \S+/new\.$"
        ):
            RunDir.open(path)


def test_open_names_a_federated_run_of_a_cost_directory(tmp_path: Path) -> None:
    for name in ("federated-seed1", "federated-seed0", "local-only-seed1"):
        (tmp_path / "x-cost" / name).mkdir(parents=True)
        (tmp_path / "x-cost" / name / "config.toml").touch()
    os.utime(tmp_path / "x-cost/local-only-seed1/config.toml", (2**32, 2**32))
    (tmp_path / "x-cost/cost.json").touch()
    for path in (tmp_path / "x-cost", tmp_path):
        with pytest.raises(
            RunDirectoryError, match=r"; \S+/federated-seed0 is a federated run of 'fedlens cost'"
        ):
            RunDir.open(path)


def test_open_says_what_is_there_instead(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="the directory does not exist"):
        RunDir.open(tmp_path / "absent")
    with pytest.raises(RunDirectoryError, match=rf"a file, not a run directory.*did you mean {run.path}"):
        RunDir.open(run.config_path)
    with pytest.raises(RunDirectoryError, match=rf"the one run below it is {run.path}"):
        RunDir.open(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match=r"no config\.toml") as caught:
        RunDir.open(tmp_path / "empty")
    assert caught.value.hint is None


def test_a_run_in_another_format_is_refused_with_its_version(run: RunDir) -> None:
    run.write_environment({"fedlens": "0.1.0"})
    assert RunDir.open(run.path).read_environment() == {"format": rundir.FORMAT, "fedlens": "0.1.0"}
    run.write_environment({"fedlens": "9.9.9", "format": 7})
    with pytest.raises(
        RunDirectoryError, match=r"written by fedlens 9\.9\.9 in format 7.*use fedlens 9\.9\.9"
    ):
        RunDir.open(run.path)


def test_optional_files_that_are_missing_are_nothing(run: RunDir) -> None:
    assert RunDir.open(run.path).read_config() == {"name": "digits", "seed": 3}
    assert (run.read_summary(), run.read_environment()) == (None, None)
    assert (run.read_metrics(), run.read_clients()) == ([], [])
    assert (run.truncate_metrics(3), run.truncate_clients(3)) == (0, 0)
    run.sync()
    assert not run.metrics_path.exists()


def test_numbers_that_are_not_finite_are_null_everywhere(run: RunDir) -> None:
    run.write_summary({"final": {"loss": math.nan}, "list": [math.inf, 1.5], "rounds": 3})
    text = run.summary_path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "final": {"loss": None},
        "list": [None, 1.5],
        "rounds": 3,
    }
    seen = {"round": 0, "loss": -math.inf, "accuracy": np.float32(0.5), "seen": torch.tensor(7)}
    jsonl.append(run.metrics_path, [plain(seen)])
    assert run.read_metrics() == [{"round": 0, "loss": None, "accuracy": 0.5, "seen": 7}]
    with pytest.raises(TypeError, match="a value of type function cannot be written as JSON"):
        jsonl.append(run.metrics_path, [plain({"round": 1, "loss": lambda: 0})])
    assert len(run.read_metrics()) == 1


def test_numbers_come_back_to_the_bit(run: RunDir) -> None:
    line = {"round": 0, "a": 0.1 + 0.2, "b": 5e-324, "c": -0.0, "d": 2**70, "e": np.float64(1 / 3)}
    jsonl.append(run.metrics_path, [plain(line)])
    assert [repr(value) for value in run.read_metrics()[0].values()] == [
        repr(value.item() if isinstance(value, np.float64) else value) for value in line.values()
    ]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("summary.json", RunDir.read_summary),
        ("environment.json", RunDir.read_environment),
        ("config.toml", RunDir.read_config),
    ],
)
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[1]\x00"])
def test_damaged_files_are_named(
    run: RunDir, name: str, read: Callable[[RunDir], Any], content: bytes
) -> None:
    (run.path / name).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"{name} is corrupt") as caught:
        read(run)
    assert caught.value.where == str(run.path / name)
    (run.path / name).unlink()
    (run.path / name).mkdir()
    with pytest.raises(RunDirectoryError, match=f"{name} is not a regular file"):
        read(run)


def test_json_that_is_no_object_is_damage(run: RunDir) -> None:
    run.summary_path.write_text("[]")
    with pytest.raises(RunDirectoryError, match="does not contain a JSON object"):
        run.read_summary()


def test_a_write_that_fails_leaves_the_old_file(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_summary({"status": "interrupted"})
    before = sorted(path.name for path in run.path.iterdir())
    if Path("/dev/full").exists():
        full = lambda path, mode: open("/dev/full", mode)  # noqa: E731, SIM115
        with monkeypatch.context() as patch:
            patch.setattr(files, "open", full, raising=False)
            with pytest.raises(RunFailed, match=r"disk is full, so summary\.json"):
                run.write_summary({"status": "finished"})
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(RunFailed, match=r"summary\.json could not be written: Permission denied"):
        run.write_summary({"status": "finished"})
    assert run.read_summary() == {"status": "interrupted"}
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_a_last_line_cut_at_any_byte_is_left_out_and_dropped(run: RunDir) -> None:
    rows = [{"round": k, "name": "é", "clients": {"a": [k]}} for k in range(3)]
    for row in rows:
        jsonl.append(run.metrics_path, [row])
    whole = run.metrics_path.read_bytes()
    two = b"".join(whole.splitlines(keepends=True)[:2])
    for length in range(len(two), len(whole) + 1):
        run.metrics_path.write_bytes(whole[:length])
        complete = length >= len(whole) - 1
        assert run.read_metrics() == rows[: 3 if complete else 2]
        assert run.truncate_metrics(2) == (0 if complete or length == len(two) else 1)
        assert run.metrics_path.read_bytes() == (whole if complete else two)
    run.metrics_path.write_bytes(two + b"\0" * 700)
    assert run.truncate_metrics(2) == 1
    jsonl.append(run.metrics_path, [rows[2]])
    assert run.metrics_path.read_bytes() == whole


def test_a_line_that_cannot_be_read_before_the_last_is_an_error_with_its_number(run: RunDir) -> None:
    run.metrics_path.write_bytes(b'{"round": 0}\n{"rou\n{"round": 2}\n')
    for action in (run.read_metrics, lambda: run.truncate_metrics(0)):
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2"):
            action()
    run.metrics_path.unlink()
    run.metrics_path.mkdir()
    with pytest.raises(RunDirectoryError, match="is not a regular file"):
        run.read_metrics()


def test_lines_past_the_checkpoint_are_dropped_and_the_others_left_as_they_are(run: RunDir) -> None:
    run.metrics_path.write_bytes(b'{"round":0,  "x": 1.10}\n{"round": 1}\n{"round": 2}\n{"round": 3}\n{"ro')
    assert run.truncate_metrics(after_round=1) == 3
    assert run.metrics_path.read_bytes() == b'{"round":0,  "x": 1.10}\n{"round": 1}\n'
    stamp = run.metrics_path.stat()
    assert run.truncate_metrics(after_round=1) == 0
    assert run.metrics_path.stat().st_ino == stamp.st_ino
    assert run.truncate_metrics(after_round=-1) == 2
    assert run.read_metrics() == []


def test_clients_are_kept_like_metrics(run: RunDir) -> None:
    for number in range(3):
        rows = [{"round": number, "client": client, "loss": math.nan} for client in "ab"]
        jsonl.append(run.clients_path, plain(rows))
    assert len(run.read_clients()) == 6
    assert run.truncate_clients(0) == 4
    assert run.read_clients() == [{"round": 0, "client": client, "loss": None} for client in "ab"]
    run.sync()


def test_a_line_that_the_disk_takes_only_half_is_taken_back(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl.append(run.metrics_path, [{"round": 0}])
    write = os.write

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 9:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:6])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(RunFailed, match=r"disk is full.*metrics\.jsonl"):
            jsonl.append(run.metrics_path, [{"round": 1}])
    assert run.metrics_path.read_bytes() == b'{"round": 0}\n'
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:5]))
    jsonl.append(run.metrics_path, [{"round": 1}])
    assert run.read_metrics() == [{"round": 0}, {"round": 1}]


def test_two_in_one_process_cannot_hold_a_run_and_the_next_can(run: RunDir) -> None:
    refused = pytest.raises(RunDirectoryError, match=rf"in use by process {os.getpid()}.*wait for it to end")
    with run.lock(), refused, run.lock():
        pytest.fail("locked twice")
    with run.lock():
        pass


HOLD = """
import os, sys, time
from pathlib import Path
from fedlens.run.rundir import RunDir
with RunDir(Path(sys.argv[1])).lock():
    worker = os.fork() if sys.argv[2] == "with-worker" else 1
    if worker == 0 or sys.argv[2] == "alone":
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("worker", ["alone", "with-worker"])
def test_a_lock_of_another_process_is_refused_and_dies_with_it(run: RunDir, worker: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, run.path, worker], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    try:
        with pytest.raises(RunDirectoryError, match=f"in use by process {holder.pid}"), run.lock():
            pytest.fail("locked twice")
        holder.kill()
        holder.wait()
        with run.lock():
            assert (run.path / ".lock").read_text() == f"{os.getpid()}\n"
        if worker == "with-worker":
            os.kill(orphan, 0)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        if worker == "with-worker":
            os.kill(orphan, signal.SIGKILL)


def test_a_directory_that_is_gone_cannot_be_locked(tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirectoryError, match="cannot be locked: No such file"),
        RunDir(tmp_path / "gone").lock(),
    ):
        pytest.fail("locked nothing")


WRITE = """
import sys
from pathlib import Path
from fedlens.files import jsonl
from fedlens.run.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
for number in range(100_000):
    jsonl.append(run.metrics_path, [{"round": number, "text": "x" * 500}])
    run.write_summary({"round": number, "text": "x" * 5000})
    if number % 5 == 4:
        run.truncate_metrics(number - 1)
        jsonl.append(run.metrics_path, [{"round": number, "text": "x" * 500}])
    print(number, flush=True)
"""


def test_a_kill_at_any_moment_leaves_readable_files_and_a_reader_sees_whole_ones(run: RunDir) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITE, run.path], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        writer.stdout.readline()
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            rounds = [row["round"] for row in run.read_metrics()]
            assert rounds == list(range(len(rounds)))
            summary = run.read_summary()
            assert summary is not None
            assert len(summary["text"]) == 5000
    finally:
        writer.kill()
        told = writer.communicate()[0].split()
    rounds = [row["round"] for row in run.read_metrics()]
    assert rounds == list(range(len(rounds)))
    assert len(rounds) >= int(told[-1])
    run.write_summary({"after": "the kill"})
    with run.lock():  # removes what the killed process was writing to
        left = {path.name for path in run.path.iterdir()}
    assert left == {"config.toml", "metrics.jsonl", "summary.json", ".lock"}


@pytest.mark.parametrize("seen", [b'{"rou', b'{"round": 1}'])
def test_a_reader_ends_where_the_file_ended_when_a_line_is_still_being_appended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, seen: bytes
) -> None:
    whole = b'{"round": 0}\n{"round": 1}\n{"round": 2}\n'
    shown = whole.index(b"\n") + 1 + len(seen)

    class Growing(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            line = super().readline(size)
            if not line.endswith(b"\n"):  # the writer's next page arrives
                here = self.tell()
                self.write(whole[shown:])
                self.seek(here)
            return line

    monkeypatch.setattr(jsonl, "open_readable", lambda path: Growing(whole[:shown]))
    rounds = [row["round"] for row in jsonl.stream(run.metrics_path)]
    assert rounds == ([0, 1] if seen.endswith(b"}") else [0])


def test_every_path_lies_in_the_directory_under_its_published_name(run: RunDir) -> None:
    names = {name: getattr(run, name).name for name in dir(RunDir) if name.endswith("_path")}
    assert names == {
        "checkpoint_path": "checkpoint",
        "states_path": "states",
        "recordings_path": "recordings",
        "journal_path": "journal",
        "private_path": "private.jsonl",
        "pretraining_path": "pretraining.json",
        "best_path": "best.safetensors",
        "client_tests_path": "client_tests.json",
        "clients_path": "clients.jsonl",
        "participation_path": "participation.jsonl",
        "pseudonyms_path": "pseudonyms.json",
        "shared_path": "report-pseudonyms.html",
        "config_path": "config.toml",
        "environment_path": "environment.json",
        "evaluation_path": "evaluation.npz",
        "examples_path": "examples.npz",
        "held_out_path": "held_out.npz",
        "labels_path": "labels_to_check.csv",
        "initial_path": "initial.safetensors",
        "metrics_path": "metrics.jsonl",
        "model_path": "model.safetensors",
        "npz_path": "partition.npz",
        "partition_path": "partition.npz",
        "roster_path": "roster.json",
        "predictions_path": "predictions",
        "report_path": "report.html",
        "serve_path": "serve.json",
        "serve_log_path": "serve.log.jsonl",
        "answers_path": "answers.jsonl",
        "summary_path": "summary.json",
    }


def test_nothing_here_imports_torch() -> None:
    imports = "import sys, fedlens.run.rundir, fedlens.run.environment"
    program = f"{imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_every_error_is_one_sentence_without_a_traceback(run: RunDir) -> None:
    with pytest.raises(FedlensError) as caught:
        RunDir.create(run.path, "digits", None)
    assert "\n" not in str(caught.value)
