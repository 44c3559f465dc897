"""Personal leaves on a GPU: before a client's first visit they are the model's initial ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.api import Result
from fedlens.cost_runs import cost
from tests.contract.contract_kit import experiment, outcome

INLINE = {"name": "inline", "channels_last": False}
SMALL: dict[str, Any] = {"rounds": 2, "local": {"lr": 0.05, "epochs": 1, "batch_size": 80}}


def _run(folder: Path, algorithm: str, **engine: Any) -> Result:
    model = {"name": "small-cnn", "norm": "batch"}
    return experiment(algorithm, **SMALL, model=model, engine=INLINE | engine).run(folder)


@pytest.mark.parametrize("algorithm", ["fedbn", "local-only"])
def test_personal_leaves_train_on_the_gpu_as_on_the_processor(algorithm: str, tmp_path: Path) -> None:
    here = _run(tmp_path / "cpu", algorithm)
    there = _run(tmp_path / "cuda", algorithm, device="cuda")
    assert outcome(there) == outcome(here)


def test_cost_finishes_all_of_its_runs_on_the_gpu(tmp_path: Path) -> None:
    made = cost(
        experiment(**SMALL, model="linear", engine=INLINE | {"device": "cuda"}), seeds=1, out=tmp_path / "c",
        report=False,
    )  # fmt: skip
    assert {run["role"]: run["status"] for run in made.answer["runs"]} == dict.fromkeys(
        ("federated", "iid", "centralized", "local-only"), "finished"
    )
