"""What is made of a run on a GPU: its analyses, its resumption, predictions, exports and pre-trained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedlens.analyses.analyze import analyze
from fedlens.analyses.registry import ANALYSES
from fedlens.api import Experiment, Result, resume
from fedlens.pretraining import pretrain
from fedlens.run.rundir import RunDir
from fedlens.use.export import export
from fedlens.use.predict import predict
from fedlens.use.trained_model import read_trained
from tests.contract.contract_kit import Stopping, nightly_but, outcome
from tests.gpu.conftest import SIMULATED
from tests.gpu.device_kit import DATA, GPU, GROUP_NORM, both, small
from tests.unit.data.pictures import pixels, write


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Result]:
    """A run of which every local model and update is kept, on the processor and on the GPU."""
    record = {"local_models": {"every": 1}, "updates": {"every": 1}}
    return both(
        tmp_path_factory.mktemp("recorded"),
        small(model=GROUP_NORM, record=record, rounds=1, select={"clients_per_round": 3}),
    )


SMALLER = {"loss-surface": {"count": 3}, "loss-plane": {"points": 3}, "line": {"points": 3}}


@pytest.mark.parametrize("name", nightly_but(("loss-surface", "line"), ANALYSES))
def test_an_analysis_has_the_numbers_of_the_processor(
    name: str, recorded: tuple[Result, Result], tmp_path: Path
) -> None:
    settings = {name: SMALLER[name]} if name in SMALLER else None
    here, there = (
        analyze(result.directory, [name], settings=settings, out=tmp_path / str(k)).rows
        for k, result in enumerate(recorded)
    )
    assert there[name]
    if SIMULATED:
        assert there == here


@pytest.mark.nightly
def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    given = small("scaffold", checkpoint={"seconds": 0})
    engine = {"engine": {"name": "inline", "device": GPU, "channels_last": False}}
    whole = Experiment(**given | engine).run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        Experiment(**given | engine).run(tmp_path / "stopped", progress=Stopping(1))
    assert outcome(resume(tmp_path / "stopped")) == outcome(whole)


def test_its_model_predicts_as_the_processors(recorded: tuple[Result, Result], tmp_path: Path) -> None:
    images = [write(tmp_path / f"{k}.png", pixels(k, channels=1)) for k in range(3)]
    rows = [list(predict(read_trained(RunDir(result.directory)), images)) for result in recorded]
    assert [row["fault"] for row in rows[1]] == [None] * 3
    if SIMULATED:
        assert rows[1] == rows[0]


@pytest.mark.parametrize("ending", nightly_but(["safetensors"], ["safetensors", "pt2", "onnx"]))
def test_its_model_is_exported(ending: str, recorded: tuple[Result, Result], tmp_path: Path) -> None:
    made = export(read_trained(RunDir(recorded[1].directory)), tmp_path / f"model.{ending}")
    assert made.file.is_file()


def test_pretrained_weights_are_those_of_the_processor(tmp_path: Path) -> None:
    data = {"dataset": DATA["dataset"], "partition": {"name": "iid", "clients": 4}, "augment": ["flip"]}
    given = small(
        task={"name": "simsiam", "width": 8, "bottleneck": 4}, model=GROUP_NORM, data=data, rounds=1
    )
    weights = []
    for device in ("cpu", GPU):
        engine = {"engine": {"name": "inline", "device": device, "channels_last": False}}
        made = pretrain(Experiment(**given | engine), tmp_path / device / "weights.safetensors", report=False)
        weights.append(load_file(made.files.weights))
    tolerance = 0.0 if SIMULATED else 1e-2
    torch.testing.assert_close(weights[1], weights[0], rtol=tolerance, atol=tolerance)
