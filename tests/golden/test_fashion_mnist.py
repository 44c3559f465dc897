"""The curve of a small run on Fashion-MNIST, as it was before tasks measured more than loss and accuracy.

The batches of an evaluation decide how its loss is rounded: the default of `evaluation.batch_size` stays 500 here.
"""

import os

import pytest

from fedlens.api import Experiment

LOSSES = [2.4427589599609374, 2.385202014160156, 1.9597184387207032]
CORRECT = [1221, 4214, 3826]


@pytest.mark.skipif("FEDLENS_DATA" not in os.environ, reason="FEDLENS_DATA is not set")
def test_the_curve_is_as_it_was(tmp_path) -> None:
    partition = {"name": "dirichlet", "clients": 20, "alpha": 0.3}
    result = Experiment(
        seed=0,
        rounds=2,
        data={"dataset": "fashion-mnist", "partition": partition},
        model="linear",
        local={"lr": 0.05, "batch_size": 50, "epochs": 1},
        select={"name": "uniform", "clients_per_round": 5},
        engine={"name": "inline", "threads": 1},
    ).run(tmp_path / "run")
    assert [round(line["test_accuracy"] * 10_000) for line in result.metrics] == CORRECT
    assert [line["test_loss"] for line in result.metrics] == pytest.approx(LOSSES, abs=1e-5)
