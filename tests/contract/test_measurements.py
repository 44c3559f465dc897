"""Pooled over clients or central, in one process or several: the same measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.algorithms.averaging import Averaging
from fedlens.algorithms.client_evaluation import everywhere
from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientStates, RoundContext
from fedlens.core.random import Rng
from fedlens.run.build import build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.tasks.central_evaluation import central
from tests.contract.contract_kit import HELD_OUT, settings
from tools.task_table import one_class_a_pixel, per_pixel

pytestmark = pytest.mark.usefixtures("quick_workers")

INLINE = {"name": "inline", "threads": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "inline": INLINE,
    "vectorized": {"name": "vectorized", "threads": 1},
    "processes-2": {"name": "processes", "workers": 2, "threads": 1},
    "processes-1": {"name": "processes", "workers": 1, "threads": 1},
    "processes-4": {"name": "processes", "workers": 4, "threads": 1},
    "ray": {"name": "ray", "workers": 2, "threads": 1},
}
NIGHTLY = ("processes-1", "processes-4", "ray")


# The changed settings of each task, and the metrics that are ratios of integers.
TASKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "classification": ({}, ("accuracy", "accuracy_top5", "accuracy_balanced")),
    "segmentation": (
        {"data": {"dataset": one_class_a_pixel, "partition": "natural"}, "model": per_pixel},
        ("mean_iou", "accuracy", "accuracy_balanced", "frequency_iou"),
    ),
}


def measured(
    engine: str, folder: Path, task: str = "classification"
) -> tuple[dict[str, float], dict[str, float], Any]:
    """The metrics of the held-out examples, pooled over clients and central, and the central sums."""
    made = settings("fedavg", "dirichlet", **{"engine": ENGINES[engine], "model": "mlp", **TASKS[task][0]})
    made["data"] = made["data"] | HELD_OUT
    config = read_config({"seed": 0, **made})
    built = build(plan(config, Source({})), folder, download=False)
    algorithm, info = built.algorithm, built.federation
    assert isinstance(algorithm, Averaging)
    state, states = algorithm.init(built.model, info), ClientStates()
    context = RoundContext(1, 1, info, Rng((0, "round", 1)))
    built.engine.open(built.program, states)
    driver, tree = Driver(built.engine, states), built.model.sent(state["model"])
    try:
        at_clients = driver.drive(everywhere({"model": tree}, context, built.task, "all", pooled=True), 1)
        sums = driver.drive(central(tree, info, built.task, ["@validation"]), 1)
    finally:
        built.engine.close()
    found = built.task.metrics(sums["@validation"])
    pooled = {name: at_clients[f"validation_{name}"] for name in found}
    return pooled, found, sums["@validation"]


def compare(task: str, pooled: dict[str, float], found: dict[str, float]) -> None:
    """Metrics of integers are equal, and others but for the order in which floats are added."""
    exact = TASKS[task][1]
    assert set(exact) <= set(found)
    for name, value in found.items():
        assert pooled[name] == (value if name in exact else pytest.approx(value, rel=1e-6)), name


@pytest.fixture(scope="module")
def baseline_sums(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return measured("inline", tmp_path_factory.mktemp("data"))[2]


@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=pytest.mark.nightly) if e in NIGHTLY else e for e in ENGINES]
)
def test_central_numbers_are_the_pooled_ones_and_no_engine_shows(
    engine: str, baseline_sums: Any, tmp_path
) -> None:
    pooled, found, sums = measured(engine, tmp_path)
    compare("classification", pooled, found)
    for name, value in baseline_sums.sums.items():
        assert sums.sums[name].equal(value), name


@pytest.mark.parametrize("engine", ["inline", pytest.param("processes-2", marks=pytest.mark.nightly)])
def test_masks_are_measured_alike_at_clients_and_centrally(engine: str, tmp_path: Path) -> None:
    pooled, found, sums = measured(engine, tmp_path, "segmentation")
    compare("segmentation", pooled, found)
    again = measured("inline", tmp_path, "segmentation")[2].sums
    assert all(sums.sums[name].equal(value) for name, value in again.items())
