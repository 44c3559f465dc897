"""PyTorch's options on a GPU: tf32 and kernels that do not repeat are used where the settings ask for them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens import Experiment, Result
from fedlens.analyses.analyze import analyze
from fedlens.analyses.opened_run import OpenedRun
from fedlens.core.arithmetic import Arithmetic

FILE = str(Path(__file__))
DATA = {"name": "synthetic", "shape": [3, 16, 16], "train": 96, "test": 32, "classes": 3}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", pytest.param("tf32", marks=pytest.mark.nightly)])


def with_dropout(shape: Any, outputs: int) -> nn.Module:
    layers = nn.Conv2d(shape[0], 4, 3, 2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 49, outputs)
    return nn.Sequential(*layers)


def product(run: OpenedRun) -> list[dict[str, float]]:
    """An analysis of a user's own that computes on the GPU."""
    matrix = torch.ones(2, 2, device="cuda")
    return [{"sum": float((matrix @ matrix).sum())}]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`torch.backends.cudnn.deterministic` at each call of a linear layer on a GPU in this process."""
    seen: list[bool] = []
    forward = nn.Linear.forward

    def watched(layer: nn.Linear, inputs: Tensor) -> Tensor:
        if inputs.is_cuda:
            seen.append(torch.backends.cudnn.deterministic)
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    return seen


def experiment(engine: dict[str, Any], **tables: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {"dataset": DATA, "partition": {"name": "iid", "clients": 2}, "augment": "flip"},
        "model": f"{FILE}:with_dropout",
        "local": {"lr": 0.05, "steps": 2, "batch_size": 16},
        "engine": engine,
    }
    return Experiment(**{**settings, **tables})


Check = Callable[[Callable[[], Any]], Any]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """tf32 is allowed wherever fedlens sets no options."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def check(precision: str, simgpu: ModuleType, deterministic: list[bool]) -> Check:
    """Calls its argument, which must use tf32 if that is the precision, and kernels that repeat."""

    def call(work: Callable[[], Any]) -> Any:
        deterministic.clear()
        with simgpu.counted() as counts:
            result = work()
        assert (counts["tf32"] > 0) == (precision == "tf32"), counts.at("tf32")
        assert deterministic
        assert all(deterministic)
        return result

    return call


@PRECISIONS
def test_runs_and_analyses_compute_as_the_settings_say(precision: str, check: Check, tmp_path: Path) -> None:
    made = experiment(
        {"name": "inline", "device": "cuda", "precision": precision},
        record={"local_models": {"every": 1}, "updates": {"every": 1}},
    )
    result: Result = check(lambda: made.run(tmp_path / "run", report=False))
    few = {"loss-surface": {"count": 3}}
    check(lambda: analyze(result.directory, ["loss-surface", f"{FILE}:product"], settings=few))


@PRECISIONS
def test_the_driver_of_workers_computes_as_they_do(
    precision: str, check: Check, two_gpus: None, quick_workers: None, tmp_path: Path
) -> None:
    """The reference of `verify`, dropout included, and the encoder of the k-NN accuracy."""
    made = experiment(
        {"name": "processes", "workers": 1, "verify": 1, "device": "cuda:1", "precision": precision},
        task={"name": "simsiam", "width": 8, "bottleneck": 4},
        evaluation={"neighbours": {"dataset": DATA, "k": 3}},
    )
    check(lambda: made.run(tmp_path / "run", report=False))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_recurrent_layer_computes_as_the_settings_say(precision: str, simgpu: ModuleType) -> None:
    cuda = torch.device("cuda")
    with simgpu.counted() as counts, Arithmetic(precision).on(cuda):
        lstm = Arithmetic(precision).fit(nn.LSTM(4, 4), cuda)
        lstm(torch.ones(3, 2, 4, device=cuda))
    assert (counts["tf32"] > 0) == (precision == "tf32"), counts.at("tf32")
