"""Accuracy on Fashion-MNIST: ten clients, all of them every round, McMahan's CNN.

About twenty minutes of two cores in all. Seed 0; `pytest -m nightly tests/real/test_nightly_fashion_mnist.py`.
"""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fedlens.api import Experiment

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(3600)]


def accuracy(partition: dict[str, Any], root: Path, out: Path) -> list[float]:
    """The test accuracy of rounds 8, 9 and 10."""
    if not (root / "FashionMNIST" / "raw").is_dir():
        pytest.skip("no FashionMNIST/raw below FEDLENS_DATA")
    experiment = Experiment(
        seed=0,
        rounds=10,
        data={"dataset": "fashion-mnist", "partition": partition},
        model="mcmahan-cnn",
        select="all",
        local={"lr": 0.01, "momentum": 0.9, "epochs": 1, "batch_size": 64},
        engine="processes",
    )
    result = experiment.run(out, data_dir=root)
    sizes = result.metrics[-1]["examples"]
    assert (result.metrics[-1]["clients"], sizes) == (10, 60_000)
    return [line["test_accuracy"] for line in result.metrics if line["round"] in (8, 9, 10)]


def test_iid_clients_reach_what_a_bare_loop_reaches(real_data: Path, tmp_path: Path) -> None:
    """A bare loop gave 0.875, 0.878, 0.884."""
    assert mean(accuracy({"name": "iid", "clients": 10}, real_data, tmp_path / "run")) >= 0.87


def test_clients_of_two_classes_stay_far_below(real_data: Path, tmp_path: Path) -> None:
    """Two shards of 3,000 images, from two different classes, a client. A bare loop gave 0.51, 0.61, 0.55."""
    partition = {"name": "shards", "clients": 10, "classes_per_client": 2, "scheme": "distinct"}
    reached = mean(accuracy(partition, real_data, tmp_path / "run"))
    assert 0.3 < reached < 0.75
