"""Runs on images with several labels: engines, algorithms, a loop in bare PyTorch, comparisons and pages.

The images are real: two of scikit-learn's handwritten digits side by side, whose labels are their two classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, f1_score
from typer.testing import CliRunner

from fedlens import Experiment, Result
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError
from fedlens.cli.main import app
from fedlens.data.partition.partition import Partition
from fedlens.pages.compare import compare, write_comparison
from fedlens.pages.run_page import write_report
from tests.identity.identity_kit import IN_TWO_PARTS
from tests.unit.pages.reading import read_page

pytestmark = pytest.mark.usefixtures("quick_workers")

CLASSES = [f"digit {label}" for label in range(10)]
CLIENTS = ("bonn", "celle", "mainz", "ulm")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `write_pairs` filled."""
    root = tmp_path_factory.mktemp("pairs")
    write_pairs(root)
    return root


def write_pairs(root: Path) -> None:
    """500 pairs as PNG files, a table whose cells name the digits, and a few images of blank paper without a label."""
    digits, rng = load_digits(), np.random.default_rng(0)
    lines = ["path,label,client,split"]
    for row in range(500):
        blank = row % 50 == 0
        at = rng.integers(0, len(digits.images), 2)
        ink = np.concatenate([digits.images[k] * (not blank) for k in at], axis=1)
        Image.fromarray((ink * 255 / 16).astype(np.uint8)).save(root / f"{row:03}.png")
        label = "" if blank else ";".join(CLASSES[digits.target[k]] for k in at)
        lines.append(f"{row:03}.png,{label},{CLIENTS[row % 7 % 4]},{'test' if row % 5 == 1 else 'train'}")
    (root / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")


def dataset(root: Path, **changed: Any) -> dict[str, Any]:
    own = {"name": "image-folder", "path": str(root), "table": str(root / "pairs.csv"), "separator": ";"}
    return {**own, "channels": 1, **changed}


def experiment(root: Path, *overrides: str, **changed: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {
            "dataset": dataset(root),
            "partition": {"name": "natural"},
            "validation": 0.2,
            "validation_from": "client",
        },
        "model": "mlp",
        "local": {"lr": 0.5, "batch_size": 16},
        "select": {"clients_per_round": 3},
        "engine": "inline",
    }
    return Experiment(**(settings | changed)).with_settings(*overrides)


def measured(result: Result) -> dict[str, float]:
    """The metrics of the last round, without the time that it took."""
    return {name: value for name, value in result.metrics[-1].items() if name not in ("seconds", "elapsed")}


@pytest.fixture(scope="session")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that learns, with per-client evaluation."""
    out = tmp_path_factory.mktemp("trained") / "run"
    made = experiment(folder, "rounds=25", "local.lr=1.0", "evaluation.clients=all", "evaluation.every=5")
    return made.run(out, report=False)


def test_a_run_learns_and_its_score_is_the_average_precision(trained: Result) -> None:
    first, last = trained.metrics[0], trained.metrics[-1]
    # A classifier that knows nothing has the share of positives, 0.19, in the mean.
    assert first["test_average_precision"] < 0.35
    assert last["test_average_precision"] > 0.8
    assert last["test_f1_micro"] > 0.6
    best = trained.summary["best"]
    assert best["metric"] == "validation_average_precision"
    assert best["test_value"] > 0.8
    assert "1 cell" not in " ".join(trained.summary["notes"])
    assert any("10 images have no label" in note for note in trained.summary["notes"])


def test_the_metrics_of_a_run_are_those_of_scikit_learn_on_its_model(trained: Result, folder: Path) -> None:
    built = trained.model.eval()
    lines = [line.split(",") for line in (folder / "pairs.csv").read_text().splitlines()[1:]]
    test = [line for line in lines if line[3] == "test"]
    held = np.stack([np.asarray(Image.open(folder / line[0]))[None] for line in test])
    truth = np.array([[name in line[1].split(";") for name in CLASSES] for line in test])
    mean, std = moments(folder)
    with torch.inference_mode():
        logits = built((torch.from_numpy(held).float() / 255 - mean) / std).numpy()
    found = trained.metrics[-1]
    assert found["test_average_precision"] == pytest.approx(average_precision_score(truth, logits), abs=1e-6)
    assert found["test_f1_micro"] == pytest.approx(f1_score(truth, logits >= 0, average="micro"), abs=1e-6)
    assert found["test_f1_macro"] == pytest.approx(f1_score(truth, logits >= 0, average="macro"), abs=1e-6)
    loss = F.binary_cross_entropy_with_logits(torch.from_numpy(logits), torch.from_numpy(truth).float())
    assert found["test_loss"] == pytest.approx(loss.item(), rel=1e-5)


def moments(folder: Path) -> tuple[float, float]:
    """Mean and deviation of the training images, scaled to [0, 1]."""
    lines = [line.split(",") for line in (folder / "pairs.csv").read_text().splitlines()[1:]]
    train = np.stack([np.asarray(Image.open(folder / line[0])) for line in lines if line[3] == "train"]) / 255
    return float(train.mean()), float(train.std())


def test_one_round_is_that_of_a_loop_in_bare_pytorch(folder: Path, tmp_path: Path) -> None:
    made = experiment(
        folder,
        "data.validation=0.0",
        "data.validation_from=global",
        "select.clients_per_round=4",
        "local.batch_size=500",  # one batch holds all examples, in their order
        "local.epochs=3",
        rounds=1,
    )
    # A rate so small that no weight changes: the result is the initial model.
    start = made.with_settings("local.lr=1e-30").run(tmp_path / "start", report=False).model
    result = made.run(tmp_path / "run", report=False)
    lines = [line.split(",") for line in (folder / "pairs.csv").read_text().splitlines()[1:]]
    train = [line for line in lines if line[3] == "train"]
    images = np.stack([np.asarray(Image.open(folder / line[0]))[None] for line in train])
    mean, std = moments(folder)
    inputs = (torch.from_numpy(images).float() / 255 - mean) / std
    labels = torch.tensor([[float(name in line[1].split(";")) for name in CLASSES] for line in train])
    rows = Partition.load(result.directory / "partition.npz")
    averaged: dict[str, torch.Tensor] = {}
    for k in range(4):
        model, at = deepcopy(start).train(), torch.from_numpy(rows[k].copy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(inputs[at]), labels[at]).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            averaged[name] = averaged.get(name, 0.0) + len(rows[k]) / len(train) * value
    for name, value in load_file(result.directory / "model.safetensors").items():
        torch.testing.assert_close(value, averaged[name], rtol=1e-4, atol=1e-5)


def test_engines_agree(folder: Path, tmp_path: Path) -> None:
    made = experiment(folder, "evaluation.clients=all")
    inline = measured(made.run(tmp_path / "inline", report=False))
    workers = made.with_settings('engine={name="processes", workers=2}').run(tmp_path / "two", report=False)
    assert measured(workers) == inline
    stacked = made.with_settings('engine={name="vectorized"}').run(tmp_path / "stacked", report=False)
    assert measured(stacked).keys() == inline.keys()
    for name, value in measured(stacked).items():
        assert math.isclose(value, inline[name], rel_tol=1e-4, abs_tol=1e-6), name


def test_each_client_is_measured_with_every_metric_that_its_images_define(trained: Result) -> None:
    lines = (trained.directory / "clients.jsonl").read_text().splitlines()
    rows = [row for line in lines if (row := json.loads(line))["round"] == 25]
    at_clients = [row for row in rows if "validation_average_precision" in row]
    assert {row["client"] for row in at_clients} == set(CLIENTS)
    last = trained.metrics[-1]
    for metric in ("average_precision", "f1_micro", "f1_macro", "loss"):
        values = [row[f"validation_{metric}"] for row in at_clients]
        assert last[f"clients_{metric}_mean"] == pytest.approx(float(np.mean(values)), rel=1e-12)
    assert trained.summary["clients"]["mean"] == last["clients_average_precision_mean"]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["task.label_smoothing=0.1"], marks=pytest.mark.nightly),
        ["task.class_weights=balanced"],
        ["task.class_weights=[1, 1, 1, 1, 1, 2, 2, 2, 2, 0]"],
        ["task.score=f1_macro"],
        ["data.partition={name='lda-multilabel', clients=5, alpha=0.3}"],
        pytest.param(["data.partition={name='detection-frequency', clients=4}"], marks=pytest.mark.nightly),
        pytest.param(["data.partition={name='quantity', clients=4}"], marks=pytest.mark.nightly),
        ["data.partition={name='feature', clients=4, rotation=10.0}"],
        ["data.normalize=unit"],
    ],
)
def test_settings_of_the_task_and_of_the_data_work(
    folder: Path, tmp_path: Path, overrides: Sequence[str]
) -> None:
    result = experiment(folder, *overrides, rounds=1).run(tmp_path / "run", report=False)
    assert math.isfinite(result.metrics[-1]["test_average_precision"])
    if "score" in overrides[0]:
        assert result.summary["best"]["metric"] == "validation_f1_macro"


_CASES = {
    "fedbn": ["model={name='small-cnn', norm='batch'}"],
    "moon": [],
    "scaffold": ["local.lr=0.1"],
    **{name: ["local.epochs=1"] for name in ("admm", "ceadmm", "iceadmm", "liadmm")},
}
_REFUSED = {"fedir", *IN_TWO_PARTS}


def _tried(name: str) -> Any:
    """All algorithms every night, one of each family always."""
    return name if name in ("fedadam", "moon", "scaffold") else pytest.param(name, marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", [_tried(name) for name in sorted(set(ALGORITHMS) - _REFUSED)])
def test_every_algorithm_trains_on_several_labels(name: str, folder: Path, tmp_path: Path) -> None:
    made = experiment(folder, f"algorithm.name={name}", *_CASES.get(name, []), rounds=1)
    values = made.run(tmp_path / "run", report=False).metrics[-1]
    names = ("test_loss", "validation_loss", "clients_loss_mean")
    assert any(math.isfinite(values[metric]) for metric in names if metric in values)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=fedir"], "weighs examples by their class .*multi-label have no single class"),
        (["client.name=reweighted"], "weighs examples by their class"),
        (
            ["task.name=classification"],
            "the task is classification, but the dataset 'image-folder' is for multi-",
        ),
        (["task.class_weights=[1.0, 2.0]"], "has 2 weights, but the dataset has 10 classes"),
        (["task.class_weights=balanced", "engine.name=vectorized"], "class_weights"),
        (["data.partition={name='dirichlet', clients=4, alpha=0.5}"], "several classes each, not one"),
        (["data.partition={name='shards', clients=4}"], "several classes each, not one"),
    ],
)
def test_what_needs_one_class_an_image_is_refused(
    folder: Path, tmp_path: Path, overrides: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(folder, *overrides).run(tmp_path / "never", report=False)


def test_a_class_without_test_images_is_named(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "pairs.csv").read_text().splitlines()
    kept = [lines[0]] + [line for line in lines[1:] if "digit 3" not in line or not line.endswith("test")]
    (tmp_path / "fewer.csv").write_text("\n".join(kept))
    made = experiment(folder, f"data.dataset.table={tmp_path / 'fewer.csv'}", rounds=1)
    images = tmp_path / "images"
    images.mkdir()
    for line in kept[1:]:
        name = line.split(",")[0]
        (images / name).write_bytes((folder / name).read_bytes())
    result = made.with_settings(f"data.dataset.path={images}").run(tmp_path / "run", report=False)
    assert "no test image has the class 'digit 3': means over classes leave it out" in result.summary["notes"]
    assert math.isfinite(result.metrics[-1]["test_average_precision"])


def test_the_model_fits_eight_images(folder: Path, tmp_path: Path) -> None:
    made = experiment(
        folder,
        "algorithm.name=centralized",
        "evaluation.train=true",
        "local.optimizer=adam",
        "local.lr=0.01",
        data={"dataset": f"{_eight(tmp_path, folder)}:eight", "partition": {"name": "iid", "clients": 1}},
        rounds=60,
    )
    result = made.with_settings("evaluation.every=60").run(tmp_path / "run", report=False)
    assert result.metrics[-1]["train_loss"] < 0.01
    assert result.metrics[-1]["train_average_precision"] == 1.0
    assert result.metrics[-1]["train_f1_micro"] == 1.0


def _eight(tmp_path: Path, folder: Path) -> Path:
    source = f"""
from pathlib import Path
import numpy as np
from PIL import Image
import fedlens

def eight(root, download, seed):
    lines = [line.split(",") for line in Path({str(folder / "pairs.csv")!r}).read_text().splitlines()[1:9]]
    images = np.stack([np.asarray(Image.open(f"{folder}/{{line[0]}}")) for line in lines])
    labels = [list(filter(None, line[1].split(";"))) for line in lines]
    return fedlens.dataset(images, labels, images, labels)
"""
    (tmp_path / "eight.py").write_text(source)
    return tmp_path / "eight.py"


@pytest.mark.report_page
def test_pages_and_comparisons_name_the_score(trained: Result, folder: Path, tmp_path: Path) -> None:
    central = experiment(folder, "algorithm.name=centralized", "rounds=20", "evaluation.every=5").run(
        tmp_path / "central", report=False
    )
    page = read_page(write_report(trained.directory).read_text(encoding="utf-8"))
    assert "average precision" in page.words
    assert "accuracy" not in page.words.lower()
    rows = compare([trained.directory, central.directory])
    assert {row["metric"] for row in rows} == {"average_precision"}
    assert all(row["final"] > 0.5 for row in rows)
    assert all(row["accuracy"] is None for row in rows)
    assert not any("accuracy" in (row["note"] or "") for row in rows)
    both = read_page(
        write_comparison([trained.directory, central.directory], tmp_path / "c.html").read_text()
    )
    assert "final average precision" in both.words


def test_the_terminal_and_data_check_speak_of_labels(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    words = ["--set", "table=pairs.csv", "--set", "separator=;"]
    answer = runner.invoke(app, ["data", "check", str(folder), "--format", "csv", *words])
    assert answer.exit_code == 0, answer.output
    (labels,) = (line for line in answer.output.splitlines() if line.startswith("labels"))
    assert labels.endswith("an image, 10 images without any")
    assert 'separator = ";"' in answer.output
    made = experiment(folder, rounds=1)
    result = made.run(tmp_path / "run", report=False)
    assert "average_precision" in repr(result)
    partition = runner.invoke(app, ["partition", "show", str(result.directory / "partition.npz")])
    assert "EMD, weighted mean" in partition.output
