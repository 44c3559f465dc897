"""A user's own task: what is wrong with it is said before training, or with the method that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens import Experiment
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.run.progress import ProgressBase

SOURCE = """
import torch
from fedlens.core.measured import Measured
from fedlens.tasks.task import Task


class NoKind(Task):
    def loss(self, outputs, targets, weights=None, normalize=True):
        return torch.nn.functional.cross_entropy(outputs, targets)

    def measure(self, outputs, targets):
        return Measured({"examples": torch.tensor(len(targets))})

    def metrics(self, measured):
        return {"examples": float(measured.sums["examples"])}


class Whole(NoKind):
    kind = "classification"


class Plain(Whole):
    def measure(self, outputs, targets):
        return {"examples": len(targets)}


class Half(Task):
    kind = "classification"

    def loss(self, outputs, targets, weights=None, normalize=True):
        return outputs.sum()


class Loose:
    kind = "classification"

    def loss(self, outputs, targets, weights=None, normalize=True): ...
    def measure(self, outputs, targets): ...
    def metrics(self, measured): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.py"
    path.write_text(SOURCE)
    return path


def experiment(file: Path, name: str, **more: object) -> Experiment:
    settings = {
        "rounds": 1,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
        "model": "mlp",
        "local": {"lr": 0.1},
        "engine": "inline",
        "task": f"{file}:{name}",
    }
    return Experiment(**{**settings, **more})


def test_a_task_needs_no_more_than_its_kind_and_three_methods(file: Path, tmp_path: Path) -> None:
    result = experiment(file, "Whole").run(tmp_path / "run", report=False)
    assert result.metrics[-1]["test_examples"] == 360


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        (
            "NoKind",
            {},
            r"the task NoKind does not define `kind` \(task.name\); write kind = 'classification'",
        ),
        ("Half", {}, r"does not define measure, metrics"),
        ("Loose", {}, r"is of the class Loose, which does not inherit from Task"),
        ("Whole", {"algorithm": "fedir"}, r"the task Whole does not define `counts` \(task.name\)"),
        ("Whole", {"engine": "vectorized"}, r"the loss of a batch is not the mean of losses of its examples"),
        ("Whole", {"algorithm": "moon"}, r"compares one feature vector per example"),
    ],
)
def test_a_task_that_does_not_fit_is_refused_before_training(
    name: str, more: dict[str, object], words: str, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment(file, name, **more).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_measurements_of_another_class_are_refused_with_the_method(file: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"`measure` of the task Plain returned a dict"):
        experiment(file, "Plain").run(tmp_path / "run")


class Heard(ProgressBase):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def test_a_score_that_is_no_metric_chooses_no_best_round_and_is_named(file: Path, tmp_path: Path) -> None:
    file.write_text(SOURCE.replace("class Whole(NoKind):", 'class Whole(NoKind):\n    score = "dice"'))
    heard = Heard()
    result = experiment(file, "Whole").run(tmp_path / "run", report=False, progress=heard)
    assert result.summary["best"] is None
    said = "no best round is chosen: task.score is 'dice', and the evaluation gives examples"
    assert said in heard.notes
