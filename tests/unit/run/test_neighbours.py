"""The k-NN accuracy in runs: its number, exact resume, and which datasets and runs are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.api import Experiment, load_result, resume
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.synthetic import synthetic
from fedlens.data.normalize import normalize
from fedlens.tasks.nearest_neighbours import knn_accuracy

LABELLED: dict[str, Any] = {"name": "synthetic", "shape": (3, 16, 16), "train": 60, "test": 30, "classes": 3}
FRACTALS = {"name": "fractals", "train": 64, "test": 24, "codes": 30, "iterations": 60, "size": 16}


def one_class() -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3)).astype(np.uint8)
    return dataset(images, [0] * 30, images[:5], [0] * 5, classes=["cat"])


def scenes() -> Dataset:
    images = np.zeros((30, 16, 16, 3), np.uint8)
    return dataset(
        images, np.zeros((30, 16, 16), np.uint8), images[:5], np.zeros((5, 16, 16), np.uint8), classes=["sky"]
    )


def experiment(neighbours: Any, **tables: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 3,
        "data": {"dataset": FRACTALS, "partition": {"name": "iid", "clients": 2}, "augment": ["flip"]},
        "model": {"name": "small-cnn", "norm": "group"},
        "task": {"name": "simsiam", "width": 8, "bottleneck": 4},
        "local": {"lr": 0.05, "momentum": 0.9, "steps": 2, "batch_size": 16},
        "evaluation": {"every": 2, "neighbours": neighbours},
        "engine": "inline",
    }
    return Experiment(**{**settings, **tables})


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["fedavg", "centralized"])
def test_every_evaluation_has_the_accuracy_of_the_exported_features(algorithm: str, tmp_path: Path) -> None:
    table = {"dataset": LABELLED, "k": 7}
    experiment(table, algorithm=algorithm).run(tmp_path / "run", report=False)
    recorded = [line.get("test_knn_accuracy") for line in lines(tmp_path / "run")]
    assert [value is None for value in recorded] == [False, True, False, False]
    settings = {key: value for key, value in LABELLED.items() if key != "name"}
    seed = load_result(tmp_path / "run").config["seeds"]["data"]
    data = synthetic(Path(), False, seed, **settings)
    encoder = load_result(tmp_path / "run").model
    with torch.no_grad():
        features, tests = (
            encoder(normalize(torch.from_numpy(part.inputs), data.mean, data.std))
            for part in (data.train, data.test)
        )
    labels, truth = torch.from_numpy(data.train.targets), torch.from_numpy(data.test.targets)
    assert recorded[-1] == knn_accuracy(features, labels, tests, truth, k=7)
    assert recorded[-1] != knn_accuracy(features, labels, tests.flip(0), truth, k=7)


def test_measuring_changes_no_bit_of_training(tmp_path: Path) -> None:
    experiment(None).run(tmp_path / "without", report=False)
    experiment({"dataset": LABELLED}).run(tmp_path / "with", report=False)
    for one, other in zip(lines(tmp_path / "without"), lines(tmp_path / "with"), strict=True):
        assert one.get("local_loss") == other.get("local_loss")
        assert one.get("test_loss") == other.get("test_loss")


def test_a_resumed_run_has_the_same_numbers(tmp_path: Path) -> None:
    start = experiment({"dataset": LABELLED, "train": 50, "test": 20})
    start.run(tmp_path / "whole", report=False)
    start.run(tmp_path / "parts", until=1, report=False)
    resume(tmp_path / "parts", report=False)
    whole, parts = (
        [line.get("test_knn_accuracy") for line in lines(tmp_path / n)] for n in ("whole", "parts")
    )
    assert whole == parts


def test_other_labelled_images_are_refused_on_resume_unless_their_settings_changed(tmp_path: Path) -> None:
    start = experiment({"dataset": LABELLED, "train": 50, "test": 20})
    start.run(tmp_path / "run", until=1, report=False)
    environment = tmp_path / "run" / "environment.json"
    recorded = json.loads(environment.read_text())
    digest = recorded["neighbours"]["sha256"]
    environment.write_text(
        json.dumps({**recorded, "neighbours": {**recorded["neighbours"], "sha256": "0" * 64}})
    )
    with pytest.raises(RunDirectoryError, match=r"labels of evaluation\.neighbours differ"):
        resume(tmp_path / "run", report=False)
    chosen = {**recorded["neighbours"]["settings"], "train": 40}
    environment.write_text(json.dumps({**recorded, "neighbours": {"settings": chosen, "sha256": "0" * 64}}))
    resume(tmp_path / "run", until=2, report=False)
    again = experiment({"dataset": {**LABELLED, "noise": 1.0}, "train": 50, "test": 20})
    again.run(tmp_path / "other", until=1, report=False)
    assert json.loads((tmp_path / "other" / "environment.json").read_text())["neighbours"]["sha256"] != digest


def test_the_name_of_a_dataset_is_enough_and_the_settings_are_written_down(tmp_path: Path) -> None:
    data = {
        "dataset": "digits",
        "partition": {"name": "iid", "clients": 2},
        "augment": [{"name": "crop", "pad": 1}],
    }
    experiment("digits", data=data).run(tmp_path / "run", until=0, report=False)
    written = load_result(tmp_path / "run").config["evaluation"]["neighbours"]
    assert written == {
        "dataset": {"name": "digits"}, "k": 20, "temperature": 0.07, "train": 5000, "test": 1000
    }  # fmt: skip
    assert lines(tmp_path / "run")[0]["test_knn_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("neighbours", "tables", "what"),
    [
        ({"dataset": one_class}, {}, r"'arrays' have one class.*neighbours\.dataset"),
        ({"dataset": LABELLED, "k": 61}, {}, r"60 training examples, fewer than the 61.*neighbours\.k"),
        ({"dataset": LABELLED, "train": 10}, {}, r"10 training examples, fewer than the 20.*neighbours\.k"),
        ("digits", {}, r"'digits' are 1x8x8, and the encoder 'small-cnn' takes 3x16x16"),
        ({"dataset": FRACTALS}, {}, r"'fractals' have no labels \(evaluation\.neighbours\.dataset"),
        ({"dataset": scenes}, {}, r"'arrays' have no single label each: they are for segmentation"),
        ({"dataset": "no-such"}, {}, r"no-such.*evaluation\.neighbours\.dataset"),
        ({"dataset": {**LABELLED, "clases": 2}}, {}, r"clases.*evaluation\.neighbours\.dataset"),
        ({"dataset": LABELLED, "kk": 2}, {}, r"evaluation\.neighbours\.kk"),
        ({"dataset": LABELLED, "temperature": 0}, {}, r"evaluation\.neighbours\.temperature"),
        (
            "digits",
            {"task": {}, "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 2}}},
            "is for self-supervised tasks, and the task is classification",
        ),
        (
            {"dataset": LABELLED},
            {
                "algorithm": "local-only",
                "data": {
                    "dataset": FRACTALS,
                    "partition": {"name": "iid", "clients": 2},
                    "augment": ["flip"],
                    "validation": 0.2,
                    "validation_from": "client",
                },
            },
            "'local-only' makes a model for each client",
        ),
    ],
)
def test_what_has_no_such_accuracy_is_refused(
    neighbours: Any, tables: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what):
        experiment(neighbours, **tables).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
