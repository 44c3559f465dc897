"""Runs with dropout on a GPU: repeated or resumed, they have the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fedlens.api import Experiment, resume
from tests.contract.contract_kit import ALGORITHMS, outcome
from tests.gpu.device_kit import GPU, run, small
from tests.gpu.test_tasks import ROWS as TASK_ROWS
from tests.simulated_gpu import unordered

FILE = str(Path(__file__))
# With FedAvg the generators of a group's masks begin anew, with SCAFFOLD where the rule's `start` has left them.
ROWS = [
    ("inline", "fedavg"),
    pytest.param("vectorized", "fedavg", marks=pytest.mark.nightly),
    ("vectorized", "scaffold"),
]


def network(shape: Any, classes: int) -> nn.Module:
    layers = nn.Flatten(), nn.Dropout(0.25), nn.Linear(math.prod(shape), classes)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("engine", "algorithm"), ROWS)
def test_a_repeated_run_that_is_resumed_has_the_same_bits(
    engine: str, algorithm: str, tmp_path: Path
) -> None:
    made = Experiment(
        **small(algorithm, model=f"{FILE}:network") | {"engine": {"name": engine, "device": GPU}}
    )
    first = outcome(made.run(tmp_path / "first"))
    torch.rand(1, device=GPU)  # the GPU's own generator is elsewhere now
    made.run(tmp_path / "second", until=1)
    torch.rand(1, device=GPU)
    assert outcome(resume(tmp_path / "second")) == first


TASKS = {
    name: changes | {"data": changes["data"] | {"partition": "natural"}}
    for name, changes in TASK_ROWS.items()
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*ALGORITHMS, *TASKS])
def test_a_repeated_run_of_each_algorithm_and_task_has_the_same_bits(name: str, tmp_path: Path) -> None:
    given = small(name) if name in ALGORITHMS else small(**TASKS[name])
    first = outcome(run(tmp_path / "first", given, GPU))
    torch.rand(1, device=GPU)
    assert outcome(run(tmp_path / "second", given, GPU)) == first


@pytest.mark.nightly
def test_the_page_lists_what_adds_in_no_fixed_order(simgpu: ModuleType) -> None:
    page = unordered.PAGE.read_text("utf-8")
    assert unordered.rendered(page, [*unordered.models(), *unordered.parts()]) == page
