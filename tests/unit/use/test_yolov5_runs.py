"""Runs of YOLOv5 on a small dataset of boxes: notes, weights of other classes, a frozen backbone, and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from fedlens import Experiment, Result
from fedlens.base.errors import ConfigError
from fedlens.models.weights import load_weights
from fedlens.models.weights_file import read_weights
from fedlens.run.rundir import RunDir
from fedlens.settings import memory_check
from fedlens.use.export import export
from fedlens.use.trained_model import TrainedModel, read_trained
from tests.unit.models.zoo_kit import made
from tests.unit.tasks.detection_kit import settings

SQUARES = [[10.0, 10.0]] * 9
THIN = [[2.0, 200.0]] * 9


def run(directory: Path, **changed: Any) -> Result:
    model = {"name": "yolov5n", "anchors": SQUARES, **changed.pop("model", {})}
    return Experiment(**settings(rounds=1, local={"lr": 0.01, "batch_size": 8}, model=model, **changed)).run(
        directory
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("yolo") / "run")


@pytest.fixture(scope="module")
def trained(finished: Result) -> TrainedModel:
    return read_trained(RunDir.open(finished.directory), "last")


def test_a_run_measures_average_precision_and_sends_no_anchors(finished: Result) -> None:
    assert 0 <= finished.summary["final"]["test_map50"] <= 1
    tensors = read_weights(finished.directory / "model.safetensors").tensors
    assert not any("anchors" in name for name in tensors)


def test_a_run_notes_boxes_that_no_anchor_fits_before_training(
    tmp_path: Path, finished: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "_STEP", 2**40)  # as where little memory is free: the model is followed
    assert not any("anchors" in note for note in finished.summary["notes"])
    other = run(tmp_path / "run", model={"anchors": THIN})
    (note,) = [note for note in other.summary["notes"] if "anchors" in note]
    assert note.startswith("100.0% of the ")
    assert "set model.anchors" in note


@pytest.mark.nightly
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_the_raw_outputs_are_exported(trained: TrainedModel, tmp_path: Path, format: str) -> None:
    written = export(trained, tmp_path / f"model.{format}")
    assert written.error is not None
    assert written.error < 1e-4
    shapes = {output["name"]: output["shape"][1:] for output in written.facts["outputs"]}
    assert shapes == {"stride8": [3, 4, 4, 7], "stride16": [3, 2, 2, 7], "stride32": [3, 1, 1, 7]}
    if format == "onnx":
        session = onnxruntime.InferenceSession(written.file, providers=["CPUExecutionProvider"])
        images = np.zeros((2, 3, 32, 32), np.uint8)
        assert session.run(["stride8"], {"images": images})[0].shape == (2, 3, 4, 4, 7)


def test_weights_of_another_number_of_classes_leave_the_head_as_drawn(finished: Result) -> None:
    file = read_weights(finished.directory / "model.safetensors")
    module = made("yolov5n", (3, 64, 64), 5)
    drawn = {name: value.clone() for name, value in module.state_dict().items()}
    match = load_weights(module, file, 5)
    leaves = [f"head.{k}.{leaf}" for k in range(3) for leaf in ("weight", "bias")]
    assert sorted(match.head) == sorted(leaves)
    assert len(match.loaded) + len(leaves) == match.leaves
    for name, value in module.state_dict().items():
        assert torch.equal(value, drawn[name] if name in leaves else file.tensors[name])


def test_weights_of_another_width_are_refused(finished: Result) -> None:
    with pytest.raises(ConfigError, match="weights of another network"):
        load_weights(
            made("yolov5s", (3, 64, 64), 2), read_weights(finished.directory / "model.safetensors"), 2
        )


def test_a_frozen_backbone_is_not_trained(tmp_path: Path, finished: Result) -> None:
    start = f"run:{finished.directory}"
    result = run(tmp_path / "run", model={"weights": start, "freeze": "backbone"})
    before, after = (read_weights(one.directory / "model.safetensors").tensors for one in (finished, result))
    same = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert same == {"neck", "head"}
