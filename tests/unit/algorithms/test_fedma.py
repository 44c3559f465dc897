"""FedMA in an experiment: what a run of it keeps and shows, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment, load_result
from fedlens.base.errors import ConfigError
from fedlens.models.chains import widths

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "small-cnn", "width": 4},
    "data": {
        "dataset": "digits",
        "partition": {"name": "iid", "clients": 3},
        "validation": 0.2,
        "validation_from": "client",
    },
    "algorithm": "fedma",
    "local": {"lr": 0.1, "epochs": 1},
    "evaluation": {"clients": "all"},
}


@pytest.mark.report_page
def test_a_run_measures_and_keeps_the_widths_that_its_layers_grew_to(tmp_path: Path) -> None:
    result = Experiment(**SETTINGS).run(tmp_path / "run")
    last = result.metrics[-1]
    grown = [int(last["units_0"]), int(last["units_3"])]
    assert grown[0] > 4
    assert grown[1] > 8
    assert 0 < last["clients_accuracy_mean"] <= 1  # at the clients, with the same network
    assert result.metrics[0]["units_0"] == 4
    assert widths(load_result(tmp_path / "run").model) == grown
    assert "each hidden layer" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_max_width_1_keeps_the_widths_of_the_model(tmp_path: Path) -> None:
    algorithm = {"name": "fedma", "max_width": 1, "gamma": 100.0}
    result = Experiment(**SETTINGS | {"algorithm": algorithm}).run(tmp_path / "run", report=False)
    assert [(line["units_0"], line["units_3"]) for line in result.metrics] == [(4, 8)] * 3


@pytest.mark.parametrize(
    ("changes", "where", "sentence"),
    [
        ({"model": "resnet20"}, "model.name", "'bn1' (BatchNorm2d) is no convolution or linear layer"),
        ({"model": {"name": "small-cnn", "norm": "group"}}, "model.name", "'1' (GroupNorm)"),
        ({"model": {"name": "mlp", "freeze": ["1"]}}, "model.freeze", "freeze"),
        ({"server": {"name": "adam"}}, "server", "'fedma' does not use the table [server]"),
        ({"client": {"name": "proximal", "mu": 0.1}}, "client", "'fedma' does not use the table [client]"),
        ({"local": {"lr": 0.1, "examples": 32}}, "local.examples", "'fedma' does not use local.examples"),
        ({"task": {"name": "classification", "class_weights": "balanced"}}, "task.class_weights", "class weights"),
        ({"algorithm": {"name": "fedma", "max_width": 0.5}}, "algorithm.max_width", "1"),
        ({"engine": {"name": "vectorized"}}, "engine.name", "no operation of the algorithm takes several"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], where: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        Experiment(**SETTINGS | changes).run(tmp_path / "run", report=False)
    assert sentence in str(refused.value)
    assert where in str(refused.value)
