"""The device column of the contract table: a small run on the GPU beside the same run on the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlens.api import Experiment, Result
from fedlens.core.tree import Tree
from fedlens.run import checkpoint
from tests.contract.contract_kit import WITHOUT_SELECT, lines, outcome, settings, weights
from tests.gpu.conftest import SIMULATED

GPU = "cuda"
DATA: dict[str, Any] = {
    "dataset": {"name": "synthetic", "shape": [1, 8, 8], "classes": 4, "train": 26, "test": 8},
    "partition": {"name": "iid", "clients": 4, "sizes": [8, 7, 6, 5]},
    "augment": "pad-crop-flip",
}
GROUP_NORM = {"name": "small-cnn", "width": 8, "norm": "group"}
# Settings of algorithms that take as many steps as they are told, whatever a client holds.
FEWER = {"fedvc": {"examples": 8}, "admm": {"max_iterations": 1}, "ceadmm": {"k_0": 1, "max_iterations": 1}}


def small(algorithm: str = "fedavg", **changes: Any) -> dict[str, Any]:
    """Settings of two rounds with two of four clients, which hold five to eight images each."""
    chosen = {} if algorithm in WITHOUT_SELECT else {"select": {"clients_per_round": 2}}
    made = settings(algorithm, **{"rounds": 2, "data": DATA, **chosen, **changes})
    fewer = {"local": {"batch_size": 4}, "algorithm": FEWER.get(algorithm, {})}
    return made | {key: made[key] | table for key, table in fewer.items()}


def tiers(chosen: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Rows and their rounds: those that are chosen take one in the ci tier, and all of them two in the nightly one."""
    return [(name, 1) for name in chosen] + [
        pytest.param(name, 2, marks=pytest.mark.nightly) for name in names
    ]


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with masks of the processor's generator, which every operation of a run begins anew."""
    if not training or p == 0:
        return input
    kept = (torch.rand(input.shape) >= p).to(input) / (1 - p)
    return input.mul_(kept) if inplace else input * kept


def run(folder: Path, given: Mapping[str, Any], device: str, engine: str = "inline", **more: Any) -> Result:
    """The run of these settings on a device, in the layout that a GPU has; gradients are computed there.

    A real GPU draws masks of dropout from a generator of its own; here it takes the processor's.
    """
    layout = {} if engine in ("vectorized", "auto") else {"channels_last": False}
    table = {"name": engine, "device": device, **layout, **more}
    places: set[str] = set()

    def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
        def differentiate(loss: Any, *arguments: Any, **named: Any) -> Any:
            losses = loss if isinstance(loss, tuple) else (loss,)  # torch.func gives a tuple
            places.update(each.device.type for each in losses)
            return function(loss, *arguments, **named)

        return differentiate

    with pytest.MonkeyPatch.context() as patch:
        for name in ("grad", "backward"):
            patch.setattr(torch.autograd, name, on_device(getattr(torch.autograd, name)))
        if not SIMULATED:
            patch.setattr(nn.functional, "dropout", dropout)
        result = Experiment(**given | {"engine": table}).run(folder)
    if engine == "inline":
        assert places == {torch.device(device).type}
    elif (
        engine == "vectorized"
    ):  # a trial of small clients, whether they may train together, is on the processor
        assert torch.device(device).type in places
    return result


def both(
    folder: Path, given: Mapping[str, Any], engine: str = "inline", **more: Any
) -> tuple[Result, Result]:
    """The runs on the processor and on the GPU."""
    here = run(folder / "cpu", given, "cpu", engine, **more)
    return here, run(folder / "gpu", given, GPU, engine, **more)


def agree(there: Result, here: Result, tolerance: float = 0.0, real: float = 1e-2) -> None:
    """Checks that weights have the same bits, and metrics too, or to a tolerance where a GPU adds in another order.

    A real GPU has other kernels: its run is only near the processor's, to the tolerance `real`.
    """
    if not SIMULATED:
        near(there, here, real)
        return
    assert weights(there) == weights(here)
    if tolerance:
        near(there, here, tolerance)
        return
    assert lines(there) == lines(here)
    assert outcome(there) == outcome(here)
    assert _evaluated(there) == _evaluated(here)


def near(there: Result, here: Result, tolerance: float = 1e-6) -> None:
    """Checks that what two runs measured, and their final models, agree to this relative and absolute tolerance."""
    for measured, expected in zip(lines(there), lines(here), strict=True):
        known = {k: v for k, v in expected.items() if v is not None}
        assert {k for k, v in measured.items() if v is not None} == set(known)
        differing = {
            k: (measured[k], value)
            for k, value in known.items()
            if measured[k] != pytest.approx(value, rel=tolerance, abs=tolerance)
        }
        assert not differing  # pytest does not show the differences of a table that is compared at once
    torch.testing.assert_close(model(there), model(here), rtol=tolerance, atol=tolerance)


def model(result: Result) -> Tree:
    """The final model."""
    return checkpoint.read_model(result.directory / "model.safetensors")[0]


def _evaluated(result: Result) -> dict[str, bytes]:
    """The sums of the test data and the most confident mistakes; none of models that stay at the clients."""
    file = result.directory / "evaluation.npz"
    return {name: array.tobytes() for name, array in np.load(file).items()} if file.exists() else {}
