"""The published ResNet-20 of CIFAR-10, through `model.weights`, against its author's number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens import Experiment
from fedlens.core.protocol import ModelSpec
from fedlens.data.datasets.cifar import cifar10
from fedlens.data.normalize import moments
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS
from fedlens.models.weights_file import read_weights
from fedlens.run.checkpoint import read_model

pytestmark = pytest.mark.real
ACCURACY = 0.9173  # 8.27 % error, as its author states


def experiment(file: Path, dataset: str = "cifar10", **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {"dataset": dataset, "partition": {"name": "iid", "clients": 500}, "normalize": "imagenet"},
        "model": {"name": "resnet20", "weights": str(file)},
        "select": {"clients_per_round": 1},
        "local": {"lr": 0.01, "steps": 1, "batch_size": 4},
        "engine": "inline",
    }
    return Experiment(**{**settings, **more})


def at_first(run: Path) -> dict[str, Any]:
    line: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return line


def spec(file: Path, classes: int) -> ModelSpec:
    prepare = Preparation(weights=str(file))
    return ModelSpec(MODELS.find("resnet20"), "resnet20", {}, (3, 32, 32), classes, seed=0, prepare=prepare)


def test_the_published_weights_are_right_about_every_fiftieth_test_image(
    real_data: Path, resnet20_file: Path
) -> None:
    test = cifar10(real_data, False, 0).test
    some = test.take(np.arange(0, len(test), 50))  # the test images are sorted by class
    images, labels = torch.as_tensor(some.inputs), torch.as_tensor(some.targets)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in moments("imagenet", (0.0,) * 3, (1.0,) * 3))
    with torch.no_grad():
        logits = spec(resnet20_file, 10).build().eval()((images / 255 - mean) / std)
    assert (logits.argmax(1) == labels).float().mean() > 0.87


def test_a_head_for_cifar100_is_drawn_and_the_rest_loaded(resnet20_file: Path) -> None:
    model = spec(resnet20_file, 100)
    initial, published = model.build().state_dict(), read_weights(resnet20_file).tensors
    assert isinstance(model.prepare, Preparation)
    weights = model.prepare.initial_weights
    assert weights is not None
    assert weights.match is not None
    assert weights.match.head == ("linear.weight", "linear.bias")
    assert len(weights.match.loaded) == 95
    drawn = replace(model, prepare=None).build().state_dict()
    for name, value in initial.items():
        if "num_batches" not in name:
            assert torch.equal(value, (drawn if name.startswith("linear") else published)[name])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine",
    [{"name": "inline"}, {"name": "processes", "workers": 2}],
    ids=lambda engine: engine["name"],
)
def test_the_published_weights_score_what_their_author_states(
    real_data: Path, resnet20_file: Path, tmp_path: Path, engine: dict[str, Any]
) -> None:
    run = experiment(resnet20_file, engine=engine).run(tmp_path / "run", data_dir=real_data).directory
    assert at_first(run)["test_accuracy"] == ACCURACY
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["weights"]["loaded"], environment["weights"]["drawn"]) == (97, [])


@pytest.mark.nightly
def test_a_run_on_cifar100_draws_the_head_and_says_so(
    real_data: Path, resnet20_file: Path, tmp_path: Path
) -> None:
    result = experiment(resnet20_file, "cifar100").run(tmp_path / "run", data_dir=real_data)
    note = next(note for note in result.summary["notes"] if note.startswith("weights from"))
    assert note.endswith("left as drawn: linear.weight, linear.bias (the classifier)")
    initial, published = (
        read_model(result.directory / "initial.safetensors")[0],
        read_weights(resnet20_file).tensors,
    )
    assert torch.equal(initial["layer3.2.conv2.weight"], published["layer3.2.conv2.weight"])
    assert initial["linear.weight"].shape == (100, 64)
    assert at_first(result.directory)["test_accuracy"] < 0.05
