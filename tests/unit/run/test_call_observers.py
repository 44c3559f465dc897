"""Observers: which hook is called when, what a resume does with their files, and what their failures cost."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedlens import Experiment, Observer, resume
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.protocol import Reply
from fedlens.run import changes, checkpoint
from fedlens.run.call_observers import Observers
from fedlens.run.observer import Place
from fedlens.run.progress import ProgressBase
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir
from fedlens.settings.config import read_config
from fedlens.settings.own_files import own_files

pytestmark = pytest.mark.usefixtures("quick_workers")

LEAST: dict[str, Any] = {
    "rounds": 3,
    "model": "linear",
    "local": {"lr": 0.1, "steps": 2},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 5}},
    "select": {"clients_per_round": 2},
    "engine": "inline",
    "checkpoint": {"seconds": 0},
}
CLIENTS = 2
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


class Recording(Observer):
    """Writes down each call, with what it may rely on."""

    file, part_name = "rounds.jsonl", "recording"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rounds = 0

    def lines(self) -> int:
        return len(self.run.directory.read_metrics())

    def started(self, plan: dict[str, Any]) -> None:
        self.calls.append(("started", plan["rounds"]))

    def restore(self, part: Mapping[str, Any]) -> None:
        self.rounds = part["rounds"]
        self.calls.append(("restore", self.rounds))

    def began(self, run: Any) -> None:
        self.run = run
        self.calls.append(("began", run.round))

    def asks(self, steps: Any, phase: str, round: int, state: Any) -> Any:
        assert set(state) >= {"model"}
        self.calls.append(("asks", phase, round))
        return steps

    def answered(self, ask: Any, answer: Any, work: Any) -> None:
        assert isinstance(answer, Reply)
        assert answer.refused is None
        assert ask.op in self.run.built.algorithm.ops
        if work.phase == "training":
            self.calls.append(("answered", work.round, self.run.name_of(answer.client).isdigit()))

    def released(self, round: int, state: Any, tally: Any) -> None:
        self.calls.append(("released", round, tally.clients, self.lines()))

    def evaluated(self, round: int, state: Any, tally: Any, metrics: Any) -> Any:
        assert tally.clients == 0
        assert "test_accuracy" in metrics
        self.calls.append(("evaluated", round))
        return {"test_own": float(round), "test_accuracy": -1.0}

    def round_done(self, state: Any, tally: Any, metrics: dict[str, Any]) -> None:
        self.rounds += 1
        assert metrics["test_own"] == metrics["round"]
        self.calls.append(("round_done", metrics["round"], tally.clients, self.lines()))

    def rows(self, state: Any, tally: Any, metrics: dict[str, Any]) -> Any:
        return [{"clients": tally.clients, "rounds": self.rounds}]

    def part(self) -> Any:
        return {"rounds": self.rounds}

    def saved(self, round: int, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").is_file()
        self.calls.append(("saved", round, self.lines()))

    def ended(self, metrics: Any, states: Any) -> None:
        assert (self.run.directory.model_path).is_file()
        assert set(states) == {"last", "best"}
        self.calls.append(("ended", metrics["round"], states["last"][0]))

    def summary(self) -> Any:
        return {"own": self.rounds, "status": "overwritten"}

    def finished(self, summary: dict[str, Any]) -> None:
        self.calls.append(("finished", summary["status"]))


def a_round(t: int) -> list[tuple[Any, ...]]:
    """The calls of one round that is evaluated before the next begins."""
    return [
        ("asks", "training", t),
        *[("answered", t, True)] * CLIENTS,
        ("released", t, CLIENTS, t),
        ("asks", "evaluating", t),
        ("evaluated", t),
        ("round_done", t, CLIENTS, t),
        ("saved", t, t + 1),
    ]


UNTRAINED = [("released", 0, 0, 0), ("asks", "evaluating", 0), ("evaluated", 0), ("round_done", 0, 0, 0)]
ENGINES = [
    "inline",
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("default", "auto", "vectorized", "processes", "ray")
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_hooks_of_a_run_are_called_in_the_order_of_the_docstring(engine: str, tmp_path: Path) -> None:
    seen = Recording()
    Experiment(**{**LEAST, "engine": engine}).run(tmp_path / "run", progress=seen)
    rounds = [call for t in (1, 2, 3) for call in a_round(t)]
    begin, end = [("started", 3), ("began", None)], [("ended", 3, 3), ("finished", "finished")]
    assert seen.calls == [*begin, *UNTRAINED, *rounds, *end]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["own"], summary["status"]) == (4, "finished")
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["test_own"] == 3.0
    assert line["test_accuracy"] > 0, "an observer replaces no metric of the evaluation"
    assert list(line)[:2] == ["round", "test_own"]


def test_beside_the_next_round_each_hook_has_its_own_rounds_tally(tmp_path: Path) -> None:
    seen = Recording()
    beside = {"engine": {"name": "processes", "workers": 2}, "evaluation": {"overlap": True}}
    Experiment(**{**LEAST, **beside}).run(tmp_path / "run", progress=seen)
    calls = [call for call in seen.calls if call[0] != "saved"]
    first, second, third = ([("asks", "training", t), *[("answered", t, True)] * CLIENTS] for t in (1, 2, 3))

    def released(t: int) -> list[tuple[Any, ...]]:
        return [("released", t, CLIENTS, t), ("asks", "evaluating", t)]

    def done(t: int) -> list[tuple[Any, ...]]:
        return [("evaluated", t), ("round_done", t, CLIENTS, t)]

    assert calls == [
        ("started", 3), ("began", None), *UNTRAINED,
        *first, *released(1), *second, *done(1), *released(2), *third, *done(2), *released(3), *done(3),
        ("ended", 3, 3), ("finished", "finished"),
    ]  # fmt: skip


def test_a_round_that_ends_the_run_is_released_and_failed_and_nothing_else(tmp_path: Path) -> None:
    class Failing(Recording):
        def failed(self, round: int, tally: Any) -> None:
            self.calls.append(("failed", round, tally.failed))

        def answered(self, ask: Any, answer: Any, work: Any) -> None:
            self.calls.append(("answered", work.phase, work.round))

    seen = Failing()
    with pytest.raises(RunFailed):
        Experiment(**{**LEAST, "local": {"lr": 1e38, "steps": 4}}).run(tmp_path / "run", progress=seen)
    at = next(k for k, call in enumerate(seen.calls) if call[0] == "failed")
    round = seen.calls[at][1]
    assert seen.calls[at - 1][:2] == ("released", round)
    assert [call[0] for call in seen.calls[at + 1 :] if call[0] != "saved"] == ["finished"]


def test_observers_are_called_by_their_place_and_then_as_they_are_listed(tmp_path: Path) -> None:
    called: list[tuple[str, int]] = []

    class Noted(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def round_done(self, state: Any, tally: Any, metrics: dict[str, Any]) -> None:
            called.append((self.name, len(run.read_metrics())))

    class Early(Noted):
        place = Place.MEASURE

    class Late(Noted):
        place = Place.SHOW

    run = RunDir(tmp_path)
    observers = Observers([Late("late"), Noted("b"), Early("early"), Noted("a")], run)
    for complete in (False, True):
        observers.round_done({}, None, {"round": 0}, complete)  # type: ignore[arg-type]
    assert [name for name, _ in called] == ["early", "b", "a", "late"]
    called.clear()
    Experiment(**{**LEAST, "rounds": 1}).run(tmp_path / "run", progress=Late("late"))
    run = RunDir(tmp_path / "run")
    called.clear()
    Experiment(**{**LEAST, "rounds": 1}).run(tmp_path / "again", progress=Late("late"))
    assert [name for name, _ in called] == ["late", "late"]


OWN = '''
import json, os, signal
from fedlens import Observer
from fedlens.run.observer import Place


class Counts(Observer):
    """Counts replies over the run, and writes the count of each round; dies in a round."""

    file, part_name = "counts.jsonl", "counts"

    def __init__(self, *, factor: int = 1):
        self.factor, self.replies = factor, 0

    def restore(self, part):
        self.replies = part["replies"]

    def part(self):
        return {"replies": self.replies}

    def answered(self, ask, answer, work):
        self.replies += self.factor * (work.phase == "training")

    def rows(self, state, tally, metrics):
        return [{"replies": self.replies}]


class Log(Observer):
    file, resumed = "log.jsonl", "keep"

    def rows(self, state, tally, metrics):
        return [{}]


class Folders(Observer):
    file = "kept"

    def began(self, run):
        self.folder = run.directory.path / self.file

    def round_done(self, state, tally, metrics):
        (self.folder / f"round-{metrics['round']:06d}").mkdir(parents=True, exist_ok=True)


class Killing(Observer):
    place = Place.SHOW

    def round_done(self, state, tally, metrics):
        if os.environ.get("KILLED_IN") == str(metrics["round"]):
            os.kill(os.getpid(), signal.SIGKILL)


class Bad(Observer):
    def released(self, round, state, tally):
        if round == 2:
            raise ValueError("no more")

    def rows(self, state, tally, metrics):
        return [{"round": metrics["round"]}]

    file = "bad.jsonl"


class Fatal(Bad):
    ends_run = True


class Reserved(Observer):
    file = "metrics.jsonl"


class Elsewhere(Observer):
    file = "../metrics.jsonl"


class LatePart(Observer):
    place, part_name = Place.SHOW, "late"


class Old(Observer):
    def round_done(self, metrics):
        pass


class Unsaved(Observer):
    part_name = "unsaved"

    def part(self):
        return {"what": object()}


class NoObserver:
    def round_done(self, state, tally, metrics):
        pass
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_after_a_kill_files_are_cut_or_kept_and_parts_are_restored(
    own: Path, tmp_path: Path, forked: Callable[..., str]
) -> None:
    """Killed in round 3, whose line is written; the last checkpoint is that of round 1."""
    names = ["Counts", "Log", "Folders", "Killing"]
    settings = {**LEAST, "rounds": 4, "observe": [f"{own}:{name}" for name in names]}
    settings["checkpoint"] = {"seconds": 3600}
    whole = Experiment(**settings).run(tmp_path / "whole").directory
    code = (
        f"from fedlens import Experiment, resume; e = Experiment(**{settings!r})\n"
        f"e.run({str(tmp_path / 'cut')!r}, report=False, until=1)\nresume({str(tmp_path / 'cut')!r}, report=False)"
    )
    cut = tmp_path / "cut"
    assert "SIGKILL" in forked(code, KILLED_IN="3")
    assert [row["round"] for row in rows(cut / "counts.jsonl")] == [0, 1, 2, 3]
    assert checkpoint.rounds_saved(cut / "checkpoint")[-1] == 1
    resume(cut, report=False)
    assert (cut / "counts.jsonl").read_bytes() == (whole / "counts.jsonl").read_bytes()
    assert rows(whole / "counts.jsonl")[-1] == {"round": 4, "replies": 8}
    assert [row["round"] for row in rows(cut / "log.jsonl")] == [0, 1, 2, 3, 2, 3, 4]
    assert len(list((cut / "kept").iterdir())) == 5


def test_a_resume_removes_folders_of_later_rounds_and_writes_what_a_kill_left_out(
    own: Path, tmp_path: Path
) -> None:
    settings = {**LEAST, "observe": [f"{own}:Folders", f"{own}:Counts", f"{own}:Log"]}
    directory = Experiment(**settings).run(tmp_path / "run", until=2).directory
    whole = (directory / "counts.jsonl").read_bytes()
    (directory / "kept" / "round-000003").mkdir()
    (directory / "kept" / "notes").mkdir()
    (directory / "counts.jsonl").write_bytes(whole.rpartition(b'{"round": 2')[0] + b'{"rou')
    (directory / "log.jsonl").write_bytes((directory / "log.jsonl").read_bytes() + b'{"rou')
    observers = [type("Stub", (Observer,), {"file": "kept"})()]
    for name in ("counts", "log"):
        resumed = "cut" if name == "counts" else "keep"
        kind = {"file": f"{name}.jsonl", "resumed": resumed, "rows": lambda *arguments: []}
        observers.append(type(name, (Observer,), kind)())
    loaded = checkpoint.load_latest(directory / "checkpoint")
    assert loaded is not None
    Observers(observers, RunDir(directory)).rewind(RunState.of(loaded.payload))
    assert sorted(path.name for path in (directory / "kept").iterdir()) == [
        "notes", "round-000000", "round-000001", "round-000002"
    ]  # fmt: skip
    assert (directory / "counts.jsonl").read_bytes() == whole
    assert [row["round"] for row in rows(directory / "log.jsonl")] == [0, 1, 2]


def test_a_link_in_place_of_a_file_is_not_followed(own: Path, tmp_path: Path) -> None:
    settings = {**LEAST, "observe": [f"{own}:Folders"]}
    directory = Experiment(**settings).run(tmp_path / "run", until=1).directory
    elsewhere = tmp_path / "elsewhere" / "round-000009"
    elsewhere.mkdir(parents=True)
    for path in (directory / "kept").iterdir():
        path.rmdir()
    (directory / "kept").rmdir()
    os.symlink(elsewhere.parent, directory / "kept")
    heard = Heard()
    resume(directory, report=False, progress=heard)
    assert elsewhere.exists()
    assert any("symbolic link" in text or "regular" in text for text in heard.problems), heard.problems


class Heard(ProgressBase):
    def __init__(self) -> None:
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(text)


def test_a_failure_is_a_problem_and_the_run_continues_without_the_observer(own: Path, tmp_path: Path) -> None:
    heard = Heard()
    result = Experiment(**{**LEAST, "observe": f"{own}:Bad"}).run(tmp_path / "run", progress=heard)
    assert result.summary["status"] == "finished"
    assert heard.problems[0].startswith(
        "the observer Bad failed in `released`, and the run continues without it: "
    )
    assert "no more" in heard.problems[0]
    assert len(heard.problems) == 1
    assert [row["round"] for row in rows(tmp_path / "run/bad.jsonl")] == [0, 1]
    without = Experiment(**LEAST).run(tmp_path / "without")
    models = [(each.directory / "model.safetensors").read_bytes() for each in (result, without)]
    assert models[0] == models[1]


def test_a_failure_of_one_that_says_so_ends_the_run(own: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more"):
        Experiment(**{**LEAST, "observe": f"{own}:Fatal"}).run(tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("failed", 1)


def test_a_part_that_no_checkpoint_can_hold_is_a_problem_and_not_the_end(own: Path, tmp_path: Path) -> None:
    heard = Heard()
    result = Experiment(**{**LEAST, "observe": f"{own}:Unsaved"}).run(tmp_path / "run", progress=heard)
    assert result.summary["status"] == "finished"
    assert "the observer Unsaved failed in `part`" in heard.problems[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Reserved", "has the file 'metrics.jsonl'"),
        ("Elsewhere", r"has the file '\.\./metrics\.jsonl'"),
        ("LatePart", "its place is SHOW"),
        ("Old", r"takes \(metrics\), and fedlens calls it with \(state, tally, metrics\)"),
        ("NoObserver", "inherit from fedlens.Observer"),
        ("Nothing", "does not define 'Nothing'"),
    ],
)
def test_what_cannot_observe_is_refused_before_anything_is_written(
    own: Path, tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Experiment(**{**LEAST, "observe": [f"{own}:{name}"]}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_hook_of_a_listener_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    class Short(Observer):
        def released(self, round: int) -> None: ...  # type: ignore[override]

    with pytest.raises(
        ConfigError, match=r"takes \(round\), and fedlens calls it with \(round, state, tally\)"
    ):
        Experiment(**LEAST).run(tmp_path / "run", progress=Short())
    assert not (tmp_path / "run").exists()


def test_two_observers_of_one_file_are_refused(own: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"two observers have the file 'counts.jsonl'"):
        Experiment(**{**LEAST, "observe": [f"{own}:Counts", f"{own}:Counts"]}).run(tmp_path / "run")
    with pytest.raises(ConfigError, match="is no observer"):
        Experiment(**LEAST).run(tmp_path / "run", progress=object())  # type: ignore[arg-type]


def test_an_observer_has_settings_and_is_not_part_of_the_identity_of_a_run(own: Path, tmp_path: Path) -> None:
    observe = [{"name": f"{own}:Counts", "factor": 10}]
    directory = Experiment(**{**LEAST, "observe": observe}).run(tmp_path / "run", until=1).directory
    config = RunDir(directory).read_config()
    assert config["observe"] == [{"name": f"{own}:Counts", "factor": 10}]
    assert own_files(config) == {}
    assert not any(key.startswith("observe") for key in changes.defining(read_config(config)))
    own.write_text(OWN + "\n# edited\n")
    text = (directory / "config.toml").read_text()
    (directory / "config.toml").write_text(text.replace("factor = 10", "factor = 100"))
    resume(directory, report=False)
    assert [row["replies"] for row in rows(directory / "counts.jsonl")] == [0, 20, 220, 420]


def test_an_observer_sees_the_asks_and_answers_of_both_phases(tmp_path: Path) -> None:
    class Passing(Observer):
        def __init__(self) -> None:
            self.ops: list[str] = []

        def asks(self, steps: Any, phase: str, round: int, state: Any) -> Any:
            def passed() -> Any:
                try:
                    ask = next(steps)
                    while True:
                        self.ops.append(f"{phase} {round} {len(ask.requests)}")
                        ask = steps.send((yield ask))
                except StopIteration as stop:
                    return stop.value
                finally:
                    steps.close()

            return passed()

    seen = Passing()
    result = Experiment(**LEAST).run(tmp_path / "run", progress=seen)
    assert seen.ops[:3] == ["evaluating 0 1", "training 1 2", "evaluating 1 1"]
    assert result.metrics[1]["clients"] == 2


def test_the_example_writes_curves_to_tensorboard_and_a_resumed_run_shows_each_round_once(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Stop(ProgressBase):
        def round_done(self, metrics: dict[str, Any]) -> None:
            if metrics["round"] == 2:
                raise KeyboardInterrupt

    settings = {**LEAST, "observe": f"{EXAMPLES}/tensorboard_curves.py:TensorBoard"}
    directory = Experiment(**settings).run(tmp_path / "run", until=1, report=False).directory
    kept = directory.parent / "kept"
    shutil.copytree(directory / "checkpoint", kept)
    with pytest.raises(KeyboardInterrupt):
        resume(directory, progress=Stop(), report=False)
    shutil.rmtree(directory / "checkpoint")
    kept.rename(directory / "checkpoint")  # as a kill in round 2 leaves it
    result = resume(directory, report=False)
    curves = EventAccumulator(str(directory / "tensorboard"))
    curves.Reload()
    points = curves.Scalars("test_accuracy")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert [point.value for point in points] == pytest.approx(
        [line["test_accuracy"] for line in result.metrics]
    )
    assert "elapsed" in curves.Tags()["scalars"]


def test_the_trackers_of_the_example_get_each_round_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins: neither of the two is installed for tests."""
    sent: list[Any] = []

    class Run:
        def log(self, metrics: Any, step: int) -> None:
            sent.append(("log", step))

        def finish(self, exit_code: int) -> None:
            sent.append(("finish", exit_code))

    wandb = ModuleType("wandb")
    wandb.util = SimpleNamespace(generate_id=lambda: f"id{len(sent)}")  # type: ignore[attr-defined]
    wandb.init = lambda **how: (sent.append(("init", how)), Run())[1]  # type: ignore[attr-defined]
    mlflow = ModuleType("mlflow")
    for name in ("start_run", "log_param", "log_metrics", "end_run"):
        setattr(mlflow, name, lambda *given, _name=name, **more: sent.append((_name, *given, more)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    one = {**LEAST, "rounds": 1}
    observe = {"name": f"{EXAMPLES}/trackers.py:WandB", "project": "own"}
    directory = Experiment(**{**one, "observe": observe}).run(tmp_path / "wandb", until=0).directory
    resume(directory)
    how = {"project": "own", "name": "run", "id": "id0", "resume": "allow"}
    assert sent == [
        ("init", how), ("log", 0), ("finish", 1), ("init", how), ("log", 1), ("finish", 0)
    ]  # fmt: skip
    sent.clear()
    Experiment(**{**one, "observe": f"{EXAMPLES}/trackers.py:MLflow"}).run(tmp_path / "mlflow")
    assert [call[0] for call in sent] == [
        "start_run", "log_param", "log_metrics", "log_metrics", "end_run"
    ]  # fmt: skip
    assert sent[3][1]["test_accuracy"] > 0
    assert (sent[3][2], sent[4][1]) == ({"step": 1}, "FINISHED")
