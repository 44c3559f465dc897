"""The memory of local training by batch size: a fresh process each, and what cannot be measured is a row too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedlens.base.errors import ConfigError, DataError
from fedlens.benchmark import batch_memory as module
from fedlens.benchmark.batch_memory import batch_memory, info_of
from fedlens.benchmark.memory_step import RandomExamples, StepMemory, measure, planned, trial
from fedlens.cli.main import app
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.random import Rng

runner = CliRunner()
DIGITS = DatasetInfo("digits", "classification", tuple("0123456789"), (1, 8, 8))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No process is started; the list has what would have been measured."""
    asked: list[Any] = []

    def measured(recipe: str, overrides: list[str], info: DatasetInfo, batch: int) -> StepMemory:
        asked.append((info, batch))
        return StepMemory(measured=1000 * batch, estimated=1500 * batch)

    monkeypatch.setattr(module, "measured_memory", measured)
    return asked


def memory(*words: str) -> Any:
    return runner.invoke(app, ["bench", "memory", *words])


def test_a_device_that_is_not_there_is_refused_before_anything_is_measured(
    unmeasured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = memory("digits", "--batch", "8", "--set", "engine.device=cuda")
    assert answer.exit_code != 0
    assert "the device is 'cuda', but torch" in answer.stderr
    assert unmeasured == []


@pytest.mark.nightly  # three measurements, each in a process of its own; one below
def test_larger_batches_take_more_memory_and_one_that_does_not_fit_is_a_row_with_its_reason() -> None:
    words = ["fedcv/cifar100-laptop", "--shape", "3,32,32", "--classes", "100", "--set", "local.momentum=0"]
    answer = memory(*words, "--batch", "8,96,100000000", "--json")
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    small, large, huge = document["rows"]
    assert [row["batch"] for row in document["rows"]] == [8, 96, 100_000_000]
    # Each image keeps about 2 MB of activations: 88 images more than 100 MB.
    assert large["measured"] - small["measured"] > 100e6
    assert 0.5 < large["estimated"] / large["measured"] < 1.6
    assert huge["measured"] is None
    assert "GB is free" in huge["reason"]
    assert huge["estimated"] > 1e14
    assert document["experiment"]["parameters"] == document["experiment"]["trainable"] == 275_572


def test_the_table_shows_a_row_for_each_batch_size(unmeasured: list[Any]) -> None:
    answer = memory("digits", "--batch", "4,16")
    assert answer.exit_code == 0, answer.output
    assert unmeasured == [(DIGITS, 4), (DIGITS, 16)]
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["4", "4.0", "kB", "6.0", "kB", "1.50"] in lines
    assert ["16", "16.0", "kB", "24.0", "kB", "1.50"] in lines
    assert "measuring batches of 16" in answer.stderr


def test_without_batch_sizes_that_of_the_recipe_is_measured(unmeasured: list[Any]) -> None:
    assert memory("digits").exit_code == 0
    assert [batch for _, batch in unmeasured] == [10]
    with pytest.raises(ConfigError, match="all examples of a client at once"):
        batch_memory("digits", None, ["local.batch_size=all"])


def test_missing_data_are_not_needed_with_a_shape(unmeasured: list[Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="measure without data: --shape C,H,W --classes N"):
        batch_memory("fedcv/cifar100-laptop", [4], data_dir=tmp_path)
    document = batch_memory("fedcv/cifar100-laptop", [4], shape=(3, 8, 8), classes=7, data_dir=tmp_path)
    assert document["experiment"]["input_shape"] == [3, 8, 8]
    assert document["experiment"]["classes"] == 7
    assert unmeasured[0][0].kind == "classification"


@pytest.mark.parametrize(
    ("recipe", "changes", "kind"),
    [
        ("chen2022/fps-simsiam", ["local.batch_size=4"], "unlabelled"),
        ("fedcv/cifar100-laptop", ["task=simsiam"], "classification"),
        ("digits", ["task=multi-label"], "multi-label"),
    ],
)
def test_the_kind_is_that_of_the_data_and_not_the_name_of_a_task(
    recipe: str, changes: list[str], kind: str, unmeasured: list[Any], tmp_path: Path
) -> None:
    info = info_of(planned(recipe, changes), (3, 8, 8), 7, tmp_path, False)
    assert info.kind == kind


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits", "--batch", "4,x"], "not a list of batch sizes"),
        (["digits", "--batch", "0"], "not a list of batch sizes"),
        (["digits", "--shape", "1,8,8"], "--shape is set without --classes"),
        (["digits", "--classes", "8"], "--classes is set without --shape"),
        (["digits", "--shape", "8", "--classes", "8"], "3,32,32"),
        (["digit"], "did you mean 'digits'"),
        (["digits", "--set", "local.lr=-1"], "--set local.lr"),
        (["digits", "--set", "model=hsu-cnn", "--shape", "3,2,2", "--classes", "2"], "at least 4x4"),
        (["digits", "--set", "task=multi-label"], "the task is multi-label"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words: list[str], said: str, unmeasured: list[Any]) -> None:
    answer = memory(*words)
    assert answer.exit_code in (2, 3), answer.output
    assert said in " ".join(answer.output.split())
    assert not unmeasured


def test_where_no_batch_size_fits_the_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measured_memory", lambda *_: StepMemory(reason="the GPU is out of memory"))
    answer = memory("digits", "--batch", "4")
    assert answer.exit_code == 1
    assert "the GPU is out of memory" in answer.stdout


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, "the system ended the process"), (3, "the process ended with code 3: no such thing")],
)
def test_a_process_that_dies_is_a_reason(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=code, stdout="", stderr="first\nno such thing\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    reason = module.measured_memory("digits", [], DIGITS, 4).reason
    assert reason is not None
    assert said in reason


def test_an_error_in_training_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "from torch import nn\n"
        "class Fails(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(64, 10)\n"
        "    def forward(self, images):\n"
        "        raise ValueError('one image is too few')\n"
        "def fails(input_shape, classes):\n"
        "    return Fails()\n"
    )
    found = measure(trial(planned("digits", ["model=own.py:fails"]), DIGITS, 2))
    assert found.measured is None
    assert found.reason is not None
    assert "one image is too few" in found.reason


def test_random_examples_are_of_the_task_and_repeat() -> None:
    one = trial(planned("digits", []), DIGITS, 6)
    assert (one.settings.steps, one.settings.batch_size) == (3, 6)
    data = RandomExamples(one.task, one.model, 6, torch.device("cpu"))
    batches = data.batches(4, Rng((0,)))
    inputs, targets = next(batches)
    assert (inputs.shape, targets.shape) == ((4, 1, 8, 8), (4,))
    again, _ = next(batches)
    assert torch.equal(inputs, again)
    assert len(data.read_targets()) == len(data) == 6


def test_a_recipe_that_crops_is_measured_at_the_size_of_the_crop() -> None:
    streets = DatasetInfo("cityscapes", "segmentation", tuple(map(str, range(19))), (3, 1024, 2048))
    assert trial(planned("chen2022/cityscapes", []), streets, 2).model.input_shape == (3, 768, 768)


def test_a_recipe_of_texts_gets_the_vocabulary_of_its_data() -> None:
    plays = DatasetInfo("shakespeare", "language", tuple(map(str, range(90))), (80,), vocabulary=90)
    one = trial(planned("shakespeare/roles", []), plays, 2)
    inputs, _ = RandomExamples(one.task, one.model, 2, torch.device("cpu")).stretch(0, 2)
    assert int(inputs.max()) > 0
    assert one.model.build(initial=False)(inputs).shape == (2, 90)


PRINTING = """
import contextlib, runpy, sys
with open(sys.argv[2], "w") as out, contextlib.redirect_stdout(out):
    runpy.run_module("fedlens.benchmark.memory_step", run_name="__main__")
"""


def test_the_process_prints_its_measurement_on_its_last_line(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    words = {
        "recipe": "digits",
        "overrides": [],
        "batch": 4,
        "info": {"name": "d", "kind": "classification", "classes": ["0", "1"], "input_shape": [1, 8, 8]},
    }
    assert forked(PRINTING, json.dumps(words), tmp_path / "out") == "passed"
    found = StepMemory(**json.loads((tmp_path / "out").read_text().splitlines()[-1]))
    assert found.reason is None
    assert found.measured is not None
    assert found.measured > 4 * 9_000, "at least the weights"


OWN = """
from torch import nn
from fedlens.vision.detector import Detector

class Pixels(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layer = nn.Conv2d(channels, classes, 3, padding=1)

    def forward(self, images):
        return self.layer(images)

class Boxes(Pixels, Detector):
    def raw(self, images):
        return {"outputs": self.layer(images)}

    def forward(self, images, targets=None):
        outputs = self.layer(images)
        return {"boxes": sum(t["boxes"].mean() for t in targets if len(t["boxes"])) * outputs.mean()}

def pixels(input_shape, classes):
    return Pixels(input_shape[0], classes)

def boxes(input_shape, classes):
    return Boxes(input_shape[0], classes)
"""


@pytest.mark.parametrize(("kind", "model"), [("segmentation", "pixels"), ("detection", "boxes")])
def test_networks_for_masks_and_boxes_are_measured(
    kind: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    info = DatasetInfo("mine", kind, ("a", "b"), (3, 32, 32))
    found = measure(trial(planned("digits", [f"model=own.py:{model}"]), info, 4))
    assert found.reason is None
    assert found.measured is not None
    assert found.estimated is not None
    assert found.estimated > 4 * (3 + 2) * 32 * 32 * 4, "at least the images and the outputs"
