"""Run directories that are damaged, taken, in use, or not of this version; data that are not what they were."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens import Experiment, resume
from fedlens.base.errors import RunDirectoryError
from fedlens.cli.main import app
from fedlens.run import checkpoint
from fedlens.run.progress import ProgressBase
from tests.faults import faulty
from tests.faults.run_kit import experiment, fedlens, lives, outcome, summary
from tests.unit.data.layouts import IDX_FILES, with_facts, write_mnist

ROUNDS = 5


class Stops(ProgressBase):
    """Ctrl-C after a round, and all that was said."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.notes = after, list[str]()

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.after:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run `ref` and one of the same, `run`, that was stopped after round 4."""
    directory = tmp_path_factory.mktemp("stopped")
    experiment(directory, rounds=ROUNDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        Experiment.load("run.toml").run("ref")
        with pytest.raises(KeyboardInterrupt):
            Experiment.load("run.toml").run("run", progress=Stops(4))
    assert summary(directory / "run")["status"] == "interrupted"
    return directory


@pytest.fixture
def here(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda last: flip(last / "tensors.safetensors"),
    "a flipped bit in the manifest": lambda last: flip(last / "manifest.json"),
    "a missing end": lambda last: cut(last / "tensors.safetensors"),
    "a missing file": lambda last: (last / "tensors.safetensors").unlink(),
    "an empty file": lambda last: (last / "manifest.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_costs_a_round_and_nothing_else(here: Path, damage: str) -> None:
    last = max((here / "run/checkpoint").iterdir())
    assert last.name == "round-000004"
    DAMAGES[damage](last)
    told = Stops()
    assert resume("run", progress=told).summary["status"] == "finished"
    assert told.notes[0].startswith("the checkpoint of round 4 is corrupt (")
    assert told.notes[0].endswith(") and was skipped")
    assert told.notes[1] == f"resuming after round 3 of {ROUNDS}"
    assert outcome(here / "run") == outcome(here / "ref")


def test_where_all_checkpoints_are_damaged_nothing_is_touched(here: Path) -> None:
    for path in (here / "run/checkpoint").iterdir():
        flip(path / "tensors.safetensors")
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    answer = CliRunner().invoke(app, ["resume", "run"])
    assert answer.exit_code == 2
    assert answer.stderr.startswith(
        "error: no checkpoint can be read: the checkpoint of round 4 is corrupt ("
    )
    assert "start a new run: 'fedlens run run/config.toml --out ANOTHER_DIRECTORY'" in answer.stderr
    after = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    assert {p: b for p, b in after.items() if p.name != ".lock"} == {
        p: b for p, b in before.items() if p.name != ".lock"
    }
    again = CliRunner().invoke(app, ["run", "run/config.toml", "--out", "another", "--quiet"])
    assert again.exit_code == 0, again.stderr
    assert outcome(here / "another")["model"] == outcome(here / "ref")["model"]


def test_a_damaged_checkpoint_of_the_best_round_costs_its_model_only(here: Path) -> None:
    """The last rounds are not lost because the model of an earlier one cannot be read any more."""
    fading = Experiment.load("run.toml", [f"algorithm={Path(faulty.__file__)}:fading", "evaluation.every=1"])
    fading.run("faded")
    at = summary(here / "faded")["best"]["round"]
    assert at <= 2
    with pytest.raises(KeyboardInterrupt):
        fading.run("fading", progress=Stops(4))
    flip(checkpoint.path_of(here / "fading/checkpoint", at) / "tensors.safetensors")
    told = Stops()
    assert resume("fading", progress=told).summary["status"] == "finished"
    assert told.notes[-1].startswith(
        "best.safetensors was not written: the checkpoint is corrupt (tensors.safetensors"
    )
    left, right = outcome(here / "fading"), outcome(here / "faded")
    assert (left.pop("best"), right.pop("best") is not None) == (None, True)
    assert left == right


def test_a_finished_run_is_left_as_it_is(here: Path) -> None:
    before = outcome(here / "ref")
    answer = CliRunner().invoke(app, ["resume", "ref", "--json"])
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["status"] == "finished"
    assert "the run ref is already finished" in answer.stderr
    assert outcome(here / "ref") == before


def test_a_directory_that_is_taken_is_never_written_to(here: Path) -> None:
    (here / "notes").mkdir()
    (here / "notes/thesis.txt").write_text("mine")
    (here / "file").write_text("mine")
    before = sorted(here.rglob("*"))
    for out, said in {
        "run": "the directory already contains a run (run); resume it ('fedlens resume run'), or name",
        "notes": "the run directory is not empty (notes); name another directory with --out",
        "file": "a file has the path of the run directory (file)",
    }.items():
        answer = CliRunner().invoke(app, ["run", "run.toml", "--out", out, "--json"])
        assert (answer.exit_code, json.loads(answer.stdout)["status"]) == (2, "error")
        assert answer.stderr.startswith(f"error: {said}")
        assert answer.stderr.count("\n") == 1
    assert sorted(here.rglob("*")) == before


def test_a_run_of_another_version_is_refused(here: Path) -> None:
    about = json.loads((here / "run/environment.json").read_text())
    (here / "run/environment.json").write_text(json.dumps({**about, "format": 99, "fedlens": "9.1"}))
    answer = CliRunner().invoke(app, ["resume", "run", "--json"])
    assert (answer.exit_code, json.loads(answer.stdout)["status"]) == (2, "error")
    assert "written by fedlens 9.1 in format 99" in answer.stderr
    assert "use fedlens 9.1 for it" in answer.stderr


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("config.toml", "rounds = ", "config.toml is corrupt: "),
        ("environment.json", "{", "environment.json is corrupt: "),
        ("summary.json", "", "summary.json is corrupt: "),
        ("partition.npz", "PK", "not a readable partition file: "),
        (
            "metrics.jsonl",
            '{"round": 0\n{"round": 1}\n',
            "a line is not a JSON object (run/metrics.jsonl, line 1); ",
        ),
        ("metrics.jsonl", '{"round": 0}\n{\n', "a line is not a JSON object (run/metrics.jsonl, line 2); "),
    ],
)
def test_each_damaged_file_is_named(here: Path, path: str, content: str, said: str) -> None:
    (here / "run" / path).write_text(content)
    answer = CliRunner().invoke(app, ["resume", "run", "--json"])
    assert (answer.exit_code, json.loads(answer.stdout)["status"]) == (2, "error")
    assert answer.stderr.startswith(f"error: {said}")
    assert path in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_setting_that_was_changed_by_hand_and_is_wrong_is_named(here: Path) -> None:
    text = (here / "run/config.toml").read_text()
    (here / "run/config.toml").write_text(text.replace("lr = 0.05", "lr = -0.05"))
    answer = CliRunner().invoke(app, ["resume", "run"])
    assert answer.exit_code == 2
    line = next(number for number, row in enumerate(text.splitlines(), 1) if row.startswith("lr = 0.05"))
    assert answer.stderr.startswith(
        f"error: 'lr' is -0.05, but must be greater than 0 (run/config.toml, line {line}: "
    )


@pytest.mark.report_page
def test_a_run_killed_before_its_first_round_begins_anew(here: Path) -> None:
    """Whatever of its first files it had time to write."""
    order = ["clients.jsonl", "metrics.jsonl", "checkpoint", "partition.npz", "environment.json"]
    files = {path.name for path in (here / "ref").iterdir()} | {"report.html"}
    for kept in (2, 1, 0):
        for path in (here / "run").iterdir():
            if path.name not in ("config.toml", *order[::-1][:kept]):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert resume("run").summary["status"] == "finished"
        assert outcome(here / "run") == outcome(here / "ref")
        assert {path.name for path in (here / "run").iterdir()} == files


def test_two_cannot_go_on_with_one_run(here: Path) -> None:
    """The second is refused at once, and the first is not disturbed."""
    (here / "own.py").write_text((here / "own.py").read_text() + "\nimport time\ntime.sleep(1.0)\n")
    first = fedlens("resume", "run", cwd=here)
    try:
        assert first.stdout is not None
        while not (here / "run/.lock").read_text().startswith(str(first.pid)):
            assert first.poll() is None
            time.sleep(0.01)
        answer = CliRunner().invoke(app, ["resume", "run", "--json"])
        assert (answer.exit_code, json.loads(answer.stdout)["status"]) == (2, "error")
        assert (
            answer.stderr
            == f"error: the run run is in use by process {first.pid}; wait for it to end, or stop it.\n"
        )
    finally:
        out, err = first.communicate(timeout=300)
    assert (first.returncode, err) == (0, ""), out
    assert outcome(here / "run") == outcome(here / "ref")


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in MNIST's layout with few images, and a run on it that was stopped."""
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "data", with_facts(monkeypatch, "mnist", train=60, test=20))
    settings: dict[str, Any] = {"dataset": "mnist", "partition": {"name": "iid", "clients": 3}}
    with pytest.raises(KeyboardInterrupt):
        Experiment(rounds=3, model="linear", local={"lr": 0.1}, data=settings).run(
            "run", data_dir=tmp_path / "data", progress=Stops(1)
        )
    return tmp_path / "data" / "MNIST" / "raw"


@pytest.mark.parametrize("at", range(4))
def test_a_run_does_not_go_on_with_other_data(mnist: Path, at: int) -> None:
    file = mnist / IDX_FILES[at]
    content = bytearray(file.read_bytes())
    content[-1] = content[-1] ^ 1
    file.write_bytes(content)
    with pytest.raises(RunDirectoryError) as caught:
        resume("run")
    assert str(caught.value).startswith(
        "the images or labels differ from those at the start of the run (run); set --data-dir"
    )
    assert str(mnist.parent.parent) in str(caught.value)
    content[-1] = content[-1] ^ 1
    file.write_bytes(content)
    assert resume("run").summary["status"] == "finished"


def test_a_run_does_not_go_on_without_its_data(mnist: Path, tmp_path: Path) -> None:
    mnist.rename(tmp_path / "elsewhere")
    answer = CliRunner().invoke(app, ["resume", "run", "--json"])
    assert (answer.exit_code, json.loads(answer.stdout)["status"]) == (2, "error")
    assert answer.stderr.startswith("error: MNIST not found in ")
    assert summary(tmp_path / "run")["status"] == "interrupted"


def test_a_user_with_a_closed_pipe_loses_nothing(here: Path) -> None:
    """`fedlens resume run | head -1`: the run goes on to its end, and says on standard error that nobody reads."""
    with lives(here) as play:
        (ended,) = play([{"args": ["resume", "run"], "stdout": "broken pipe"}])
    assert (ended["code"], ended["err"].count("\n")) == (0, 1), ended
    assert "Broken pipe; the run continues without output" in ended["err"]
    assert summary(here / "run")["status"] == "finished"
    assert outcome(here / "run") == outcome(here / "ref")


def test_a_page_that_cannot_be_removed_does_not_hide_how_the_run_ended(here: Path) -> None:
    (here / "run/report.html").unlink(missing_ok=True)
    (here / "run/report.html").mkdir()
    told = Stops(5)
    with pytest.raises(KeyboardInterrupt):
        resume("run", progress=told, report=False)
    (note,) = [note for note in told.notes if "result page" in note]
    assert note.startswith("the earlier result page could not be removed: ")
    assert summary(here / "run")["notes"][-1] == note
    assert resume("run", report=False).summary["status"] == "finished"
