"""Runs whose client states do not fit in memory: killed, damaged or out of disk, they end with the same bits."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment, resume
from fedlens.base.errors import RunDirectoryError, RunFailed
from fedlens.core.payload import encode
from fedlens.files import model_digest
from fedlens.run import checkpoint
from fedlens.run.progress import ProgressBase
from fedlens.run.run_state import RunState
from fedlens.run.state_files import StateFiles, fault_of
from tests.faults.run_kit import lives, outcome, summary

pytestmark = pytest.mark.usefixtures("quick_workers")

# 40 clients of a megabyte each, of which four stay in memory; eight take part in a round.
OWN = """
import torch

from fedlens.algorithms.averaging import Parts, averaging
from fedlens.local.rules import ClientRule


def lean(gradients, parameters, context):
    past = context.state.get("memory")
    return gradients if past is None else [g + 0.1 * past[: g.numel()].view_as(g) for g in gradients]


def remember(parameters, context):
    memory = context.state.get("memory", torch.zeros(2**18))
    moved = torch.cat([(a - p).flatten() for a, p in zip(context.anchor, parameters)])
    memory = 0.9 * memory.roll(1) + moved.repeat(-(-memory.numel() // moved.numel()))[: memory.numel()]
    return {}, {"memory": memory, "visits": context.state.get("visits", 0) + 1}


def heavy(parts: Parts):
    return averaging(parts, client=ClientRule(grad=lean, finish=remember))
"""

TOML = """
name = "spilled"
seed = 5
rounds = {rounds}

[data]
dataset = "digits"
partition = {{ name = "iid", clients = 40 }}
validation = 0.1

[model]
name = "linear"

[select]
clients_per_round = 8

[algorithm]
name = "own.py:heavy"

[local]
lr = 0.05

[engine]
name = "{engine}"
{workers}
state_memory = {memory}

[checkpoint]
seconds = {seconds}

[record]
clients = true
"""


class Stopping(ProgressBase):
    """Ctrl-C as soon as a round is written down."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt


class Listening(ProgressBase):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def experiment(
    directory: Path, engine: str = "inline", memory: int = 4, rounds: int = 8, seconds: float = 0
) -> None:
    (directory / "own.py").write_text(OWN, encoding="utf-8")
    workers = "workers = 2" if engine == "processes" else ""
    text = TOML.format(engine=engine, workers=workers, memory=memory, rounds=rounds, seconds=seconds)
    (directory / "run.toml").write_text(text, encoding="utf-8")


def run(name: str, *more: str) -> dict[str, Any]:
    return {"args": ["run", "run.toml", "--out", name, "--json", *more]}


def auto(**how: Any) -> dict[str, Any]:
    return {"args": "auto", "out": "broken", **how}


def run_state(path: Path) -> RunState:
    loaded = checkpoint.load_latest(path / "checkpoint")
    assert loaded is not None
    return RunState.of(loaded.payload)


def states(path: Path) -> dict[Any, Mapping[str, Any]]:
    """The state of every client in the last checkpoint, from wherever it lies."""
    files, saved = StateFiles(path / "states"), run_state(path).clients.saved()
    return {**saved.states, **{client: files.get(key) for client, key in saved.keys.items()}}


def ended(path: Path) -> dict[str, Any]:
    """All that two runs must share, to the bit, whatever they had room for in memory."""
    found = outcome(path)
    del found["state"], found["tensors"], found["checkpoints"]  # where states lie, and when it was stopped
    del found["summary"]["engine"], found["summary"]["algorithm"]  # which has the folder of own.py
    structure, tensors = encode({str(client): state for client, state in sorted(states(path).items())})
    return {**found, "states": json.dumps(structure), "bits": model_digest.weights_digest(tensors)}


def check_files(path: Path) -> None:
    """There is a file for each state that a checkpoint has, whole, and nothing else."""
    wanted = checkpoint.states_of_all(path / "checkpoint")
    assert {file.stem for file in (path / "states").iterdir()} == wanted
    assert [fault for key in wanted if (fault := fault_of(path / "states", key))] == []
    last = run_state(path).clients.saved()
    assert len(last.keys) >= 30
    assert not last.states


@pytest.mark.parametrize("engine", ["inline", pytest.param("processes", marks=pytest.mark.nightly)])
def test_killed_at_any_step_it_ends_as_if_all_had_stayed_in_memory(tmp_path: Path, engine: str) -> None:
    """A round has some forty steps: eight states put away, synced and named, and the checkpoint itself."""
    draw = random.Random(engine)
    plan = [auto(call=n, signal="SIGKILL") for n in (20, 44, 61, 75, 57)]
    plan += [auto(lines=1, after=draw.uniform(0, 0.1), signal="SIGKILL")]
    plan = plan if engine == "inline" else plan[::2]
    experiment(tmp_path, engine)
    more = ["--set", "engine.name=inline", "--set", "engine.state_memory=1024"]
    with lives(tmp_path) as play:
        whole, *rest = play([run("whole", *more), *plan, auto()])
    assert (whole["code"], rest[-1]["code"]) == (0, 0), (whole, rest[-1])
    assert [life["code"] for life in rest].count(-signal.SIGKILL) >= len(plan) - 2, [
        life["code"] for life in rest
    ]
    assert ended(tmp_path / "broken") == ended(tmp_path / "whole")
    assert not (tmp_path / "whole/states").exists()
    check_files(tmp_path / "broken")


def test_a_disk_that_has_no_room_for_a_state(tmp_path: Path) -> None:
    experiment(tmp_path, seconds=3600)
    with lives(tmp_path) as play:
        full, again, resumed, whole = play(
            [
                auto(limit=500_000),
                auto(limit=500_000),
                auto(),
                run("whole", "--set", "engine.state_memory=99"),
            ]
        )
    assert [life["code"] for life in (full, again, resumed, whole)] == [1, 1, 0, 0], (full, again, resumed)
    for life in (full, again):
        assert (
            "error: the state of a client could not be written: it is larger than the largest allowed file"
            in life["err"]
        )
        assert "fedlens resume broken" in life["err"]
        assert "Traceback" not in life["err"]
    assert json.loads(full["out"])["status"] == "failed"
    assert summary(tmp_path / "broken")["status"] == "finished"
    assert ended(tmp_path / "broken") == ended(tmp_path / "whole")
    check_files(tmp_path / "broken")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How the run ends that has room for everything."""
    folder = tmp_path_factory.mktemp("undisturbed")
    experiment(folder, memory=1024, seconds=3600)
    with contextlib.chdir(folder):
        Experiment.load("run.toml").run("whole")
        return ended(folder / "whole")


@pytest.fixture
def whole(undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same, in a folder where the run can be made again."""
    monkeypatch.chdir(tmp_path)
    experiment(tmp_path, memory=1024, seconds=3600)
    return undisturbed


def stopped(name: str, round: int, *settings: str) -> Path:
    with pytest.raises(KeyboardInterrupt):
        Experiment.load("run.toml", settings).run(name, progress=Stopping(round))
    return Path(name)


def test_it_goes_on_with_another_budget(whole: dict[str, Any]) -> None:
    path = stopped("broken", 2)
    assert not (path / "states").exists()
    for memory, round in ((2, 4), (30, 6), (1, 8)):
        config = path / "config.toml"
        text, changed = re.subn("state_memory = .*", f"state_memory = {memory}", config.read_text())
        assert changed == 1
        config.write_text(text)
        with pytest.raises(KeyboardInterrupt):
            resume(path, progress=Stopping(round))
    resume(path)
    assert ended(path) == whole
    check_files(path)


def test_between_checkpoints_only_states_that_somebody_has_are_on_the_disk(whole: dict[str, Any]) -> None:
    """Long rounds without a checkpoint would else fill it. The states of the best round, not saved yet, are kept."""
    counts: list[int] = []

    class Counting(ProgressBase):
        def round_done(self, metrics: dict[str, Any]) -> None:
            counts.append(len(list(Path("broken/states").glob("*"))))

    result = Experiment.load("run.toml", ["engine.state_memory=4"]).run("broken", progress=Counting())
    clients = len(states(result.directory))
    assert 25 < clients < sum(line["clients"] for line in result.metrics) - 15  # so many states were replaced
    assert counts[-1] <= clients + 8
    assert ended(result.directory) == whole
    check_files(result.directory)


def test_a_checkpoint_is_saved_when_the_disk_has_its_states(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill does not show it, as what was written is the system's to keep; a power cut would."""
    there: set[str] = set()
    saves: list[int] = []
    sync, save = StateFiles.sync, checkpoint.save

    def synced(self: StateFiles, keys: set[str]) -> None:
        sync(self, keys)
        there.update(keys)

    def saved(directory: Path, round: int, payload: Any, keys: set[str], *more: Any) -> Path:
        assert set(payload["client_files"].values()) == set(keys) <= there
        assert all((directory.parent / "states" / f"{key}.safetensors").exists() for key in keys)
        saves.append(len(keys))
        return save(directory, round, payload, keys, *more)

    monkeypatch.setattr(StateFiles, "sync", synced)
    monkeypatch.setattr(checkpoint, "save", saved)
    Experiment.load("run.toml", ["engine.state_memory=4", "checkpoint.seconds=0"]).run("broken")
    assert len(saves) == 8
    assert saves[-1] > 25
    assert ended(Path("broken")) == whole


def test_a_damaged_state_falls_back_to_the_checkpoint_before(whole: dict[str, Any], tmp_path: Path) -> None:
    path = stopped("broken", 5, "engine.state_memory=4", "checkpoint.seconds=0")
    last, before = (
        set(RunState.of(checkpoint.load(path / "checkpoint" / name).payload).clients.saved().keys.values())
        for name in ("round-000005", "round-000004")
    )
    assert len(last - before) == 8  # the cohort of that round
    (path / "states" / f"{min(last - before)}.safetensors").write_bytes(b"gone")
    copy = shutil.copytree(path, tmp_path / "copy")
    listener = Listening()
    resume(path, progress=listener)
    assert listener.notes[0].startswith("the checkpoint of round 5 is corrupt (the state of a client, ")
    assert listener.notes[1] == "resuming after round 4 of 8"
    assert ended(path) == whole
    check_files(path)
    for key in before:
        (copy / "states" / f"{key}.safetensors").unlink()
    for name in ("000000", "000001", "000002", "000003"):  # the best, wherever it is
        shutil.rmtree(copy / "checkpoint" / f"round-{name}", ignore_errors=True)
    with pytest.raises(RunDirectoryError, match=r"no checkpoint can be read: .*No such file or directory"):
        resume(copy)


def test_the_best_round_that_is_saved_late_has_its_states(whole: dict[str, Any]) -> None:
    """It is saved with the last round, whose clients have moved on; and a run can be resumed from it."""
    every = "evaluation.every=3"
    path = stopped("broken", 7, every, "engine.state_memory=4")
    assert [p.name for p in sorted((path / "checkpoint").iterdir())] == ["round-000006", "round-000007"]
    best, last = (
        RunState.of(checkpoint.load(path / "checkpoint" / name).payload).clients.saved().keys
        for name in ("round-000006", "round-000007")
    )
    assert len(set(best.values()) - set(last.values())) > 2  # were replaced in round 7
    check_files(path)
    for key in set(last.values()) - set(best.values()):
        (path / "states" / f"{key}.safetensors").unlink()
    listener = Listening()
    resume(path, progress=listener)
    assert "resuming after round 6 of 8" in listener.notes
    other = Experiment.load("run.toml", [every]).run("other")
    assert ended(path) == ended(other.directory) != whole
    check_files(path)


def test_a_state_that_is_lost_while_the_run_goes_on_ends_it_with_a_sentence(whole: dict[str, Any]) -> None:
    """And what it saves then does not take the place of a checkpoint that is whole."""
    path = stopped("broken", 4, "engine.state_memory=4")
    kept = shutil.copytree(path / "states", "kept")

    class Losing(ProgressBase):
        def round_done(self, metrics: dict[str, Any]) -> None:
            for file in (path / "states").iterdir():
                file.unlink()

    with pytest.raises(RunFailed, match="the file of a client's state cannot be read: No such file"):
        resume(path, progress=Losing())
    shutil.copytree(kept, path / "states", dirs_exist_ok=True)
    assert run_state(path).round == 4
    resume(path)
    assert ended(path) == whole
    check_files(path)
