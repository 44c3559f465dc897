"""Runs of detection: engines, algorithms, what is refused, per-client evaluation, and pages, on drawn rectangles."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedlens import Experiment, Result
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset
from fedlens.models.registry import MODELS
from fedlens.pages.compare import compare, write_comparison
from fedlens.pages.run_page import write_report
from fedlens.run.session import Session
from tests.identity.identity_kit import IN_TWO_PARTS, PEERS
from tests.unit.pages.reading import read_page
from tests.unit.tasks.detection_kit import GridDetector, grid_detector, settings, squares

pytestmark = pytest.mark.usefixtures("quick_workers")

HELD_OUT = {"validation": 0.25, "validation_from": "client"}
TWO = {"name": "processes", "workers": 2}


def run(out: Path, *overrides: str, **changed: Any) -> Result:
    """A run of `settings`."""
    return Experiment(**settings(**changed)).with_settings(*overrides).run(out, report=False)


def measured(result: Result) -> dict[str, float]:
    """The metrics of the last round, without the time that it took."""
    return {name: value for name, value in result.metrics[-1].items() if name not in ("seconds", "elapsed")}


def held_out(**more: Any) -> dict[str, Any]:
    """The table `data` with held-out examples at each client."""
    return {"dataset": squares, "partition": {"name": "natural"}, **HELD_OUT, **more}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that learns, with per-client evaluation."""
    local = {"lr": 0.02, "batch_size": 8, "optimizer": "adam", "epochs": 4}
    data = held_out(dataset={"name": squares, "n": 80})
    out = tmp_path_factory.mktemp("trained") / "run"
    evaluation = {"clients": "all", "every": 4}
    return run(out, data=data, local=local, evaluation=evaluation, rounds=8, select={"clients_per_round": 4})


def test_a_run_learns_to_find_rectangles(trained: Result) -> None:
    first, last = trained.metrics[0], trained.metrics[-1]
    assert first["test_map50"] < 0.05
    assert trained.summary["best"]["test_value"] > 0.08
    assert last["test_map"] < last["test_map50"]
    assert trained.summary["best"]["metric"] == "validation_map50"
    assert not any("loss" in name for name in last if name != "local_loss")
    assert {"test_ap_bright", "test_ap50_dark", "test_precision", "test_recall"} <= trained.summary[
        "details"
    ].keys()


def test_runs_in_a_session_are_those_outside_and_their_boxes_count_in_its_memory(tmp_path: Path) -> None:
    session, data = Session(), {"dataset": squares, "partition": {"name": "natural"}}
    alone = run(tmp_path / "alone", rounds=1, data=data)
    inside = Experiment(**settings(rounds=1, data=data)).run(tmp_path / "in", report=False, session=session)
    assert measured(inside) == measured(alone)
    made = squares()
    boxes = [split.targets for split in (made.train, made.test)]
    arrays = [array for each in boxes for array in (each.boxes, each.labels, each.offsets)]
    images = made.train.inputs.nbytes + made.test.inputs.nbytes
    assert session.nbytes >= images + sum(array.nbytes for array in arrays)


def test_clients_that_hold_out_no_box_are_left_out_of_the_mean(trained: Result) -> None:
    lines = (trained.directory / "clients.jsonl").read_text().splitlines()
    rows = [row for line in lines if (row := json.loads(line))["round"] == 8]
    values = [row["validation_map50"] for row in rows if "validation_map50" in row]
    assert trained.metrics[-1]["clients_map50_mean"] == pytest.approx(sum(values) / len(values))
    disclosures = " ".join(trained.summary["disclosures"])
    assert "the sorted scores of its detections" in disclosures


def test_workers_give_the_bits_of_one_process(tmp_path: Path) -> None:
    """The detector draws from PyTorch's global generator in training, and the test data are cut for the workers."""
    evaluation = {"clients": "all"}
    one = run(tmp_path / "one", data=held_out(), evaluation=evaluation)
    two = run(tmp_path / "two", data=held_out(), evaluation=evaluation, engine=TWO)
    assert measured(one) == measured(two)
    trees = [load_file(result.directory / "model.safetensors") for result in (one, two)]
    assert all(torch.equal(trees[0][name], trees[1][name]) for name in trees[0])


def wide_squares(*, n: int = 6) -> Dataset:
    """The rectangles at 64x64."""
    made = squares(n=n, test=3, clients=3)

    def larger(part: Any) -> Any:
        boxes = replace(part.targets, boxes=part.targets.boxes * np.float32(2))
        return replace(part, inputs=part.inputs.repeat(2, 2).repeat(2, 3), targets=boxes)

    return replace(made, train=larger(made.train), test=larger(made.test))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("ssdlite", "fasterrcnn-mobilenet", "retinanet")
    ],
)
def test_workers_give_the_bits_of_one_process_with_torchvision(name: str, tmp_path: Path) -> None:
    assert name in MODELS.entries
    data = {"dataset": wide_squares, "partition": {"name": "natural"}}
    more = {"data": data, "model": {"name": name, "norm": "group"}, "rounds": 1}
    more["local"] = {"lr": 0.001, "batch_size": 2}
    one, two = run(tmp_path / "one", **more), run(tmp_path / "two", **more, engine=TWO)
    trees = [load_file(result.directory / "model.safetensors") for result in (one, two)]
    assert all(torch.equal(trees[0][leaf], trees[1][leaf]) for leaf in trees[0])
    assert measured(one) == measured(two)


_CASES = {
    **{name: ["local.epochs=1"] for name in ("admm", "ceadmm", "iceadmm", "liadmm")},
    "admm": ["algorithm.max_iterations=3", "local.momentum=0"],
}
_REFUSED = {"fedir", "moon", *IN_TWO_PARTS}


def _tried(name: str) -> Any:
    """All algorithms every night, one of each family always."""
    return name if name in ("fedadam", "scaffold", "mime") else pytest.param(name, marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", [_tried(name) for name in sorted(set(ALGORITHMS) - _REFUSED)])
def test_every_algorithm_of_weights_and_gradients_trains_a_detector(name: str, tmp_path: Path) -> None:
    made = settings(algorithm={"name": name}, data=held_out(), rounds=1)
    if name in {"centralized", *PEERS}:
        del made["select"]
    if name == "fedbn":
        made["model"] = {"name": grid_detector, "norm": "batch"}
    tried = Experiment(**made).with_settings(*_CASES.get(name, []))
    values = tried.run(tmp_path / "run", report=False).metrics[-1]
    names = ("test_map50", "validation_map50", "clients_map50_mean")
    assert any(math.isfinite(values[metric]) for metric in names if metric in values)
    assert values.get("failed", 0) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=fedir"], "weighs examples by their class .*detection have no single class"),
        (
            ["algorithm.name=moon"],
            "compares one feature vector per example, and models for detection have none",
        ),
        (["engine=vectorized"], "images have different numbers of boxes"),
        (["task.name=classification"], "the task is classification, but the dataset .* is for detection"),
        (["task.score=loss"], "task.score"),
    ],
)
def test_what_does_not_fit_boxes_is_refused(tmp_path: Path, overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "never", *overrides)


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    def linear(classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))

    with pytest.raises(ConfigError, match="must return a list with one dictionary for each image"):
        run(tmp_path / "never", model=linear)


def background(*, n: int = 12) -> Dataset:
    """Images of which the first client's have no box at all, and no test image a dark one."""
    made = squares(n=n, test=4, clients=2)
    own = made.train.targets
    kept = [np.arange(len(own.labels_of(at))) if at % 2 else np.empty(0, int) for at in range(n)]
    boxes = np.concatenate([own.boxes_of(at)[part] for at, part in enumerate(kept)])
    labels = np.concatenate([own.labels_of(at)[part] for at, part in enumerate(kept)])
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in kept])])
    test = made.test.targets
    return replace(
        made,
        train=replace(made.train, targets=Boxes(boxes, labels, offsets)),
        test=replace(made.test, targets=Boxes(test.boxes, np.zeros_like(test.labels), test.offsets)),
    )


def test_a_client_without_any_box_trains_on_background(tmp_path: Path) -> None:
    data = {"dataset": background, "partition": {"name": "natural"}}
    result = run(tmp_path / "run", data=data)
    assert result.metrics[-1]["failed"] == 0
    assert math.isfinite(result.metrics[-1]["local_loss"])
    assert "no test image has the class 'dark': means over classes leave it out" in result.summary["notes"]
    assert "test_ap_dark" not in result.summary["details"]


class Broken(GridDetector):
    """A detector whose boxes are NaN in evaluation."""

    def forward(self, images: Any, targets: Any = None) -> Any:
        """The answers of the grid with one NaN in each image."""
        found = super().forward(images, targets)
        if not self.training:
            for one in found:
                one["boxes"][0] = torch.nan
        return found


def broken(classes: int) -> nn.Module:
    """The model as a user's own function."""
    return Broken(classes)


def test_boxes_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    result = run(tmp_path / "run", model=broken)
    assert math.isfinite(result.metrics[-1]["test_map50"])
    assert result.summary["details"]["test_detections_not_finite"] == 12


def test_a_detector_that_finds_nothing_scores_zero(tmp_path: Path) -> None:
    result = run(tmp_path / "run", model={"name": grid_detector, "threshold": 2.0})
    assert result.metrics[-1]["test_map50"] == result.metrics[-1]["test_map"] == 0


@pytest.mark.report_page
def test_pages_comparisons_and_predictions_speak_of_boxes(trained: Result, tmp_path: Path) -> None:
    page = read_page(write_report(trained.directory).read_text(encoding="utf-8"))
    assert "map50" in page.words.lower() or "map at 0.5" in page.words.lower()
    other = run(tmp_path / "other", rounds=1, data=held_out())
    rows = compare([trained.directory, other.directory])
    assert {row["metric"] for row in rows} == {"map50"}
    words = read_page(
        write_comparison([trained.directory, other.directory], tmp_path / "c.html").read_text()
    ).words
    assert "final" in words
    assert "map50" in repr(trained)
