"""The example ditto.py: without a pull, the models of the clients are those of local-only, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment
from fedlens.base.errors import ConfigError

DITTO = f"{Path(__file__).parents[3]}/docs/examples/ditto.py:ditto"
HELD_OUT = {"validation": 0.2, "validation_from": "client"}


def experiment(algorithm: dict[str, Any], **held_out: Any) -> Experiment:
    shards = {"name": "shards", "clients": 4, "classes_per_client": 3}
    return Experiment(
        rounds=2, model="linear", data={"dataset": "digits", "partition": shards, **held_out}, engine="inline",
        select={"fraction": 1.0}, local={"lr": 0.1, "steps": 3, "batch_size": 20}, algorithm=algorithm,
    )  # fmt: skip


def test_without_a_pull_it_is_local_only(tmp_path: Path) -> None:
    def measured(name: str, algorithm: dict[str, Any]) -> list[Any]:
        result = experiment(algorithm, **HELD_OUT).run(tmp_path / name, report=False)
        return [[line["clients_loss_mean"], line["clients_accuracy_worst_decile"]] for line in result.metrics]

    alone = measured("alone", {"name": "local-only"})
    assert measured("free", {"name": DITTO, "lam": 0.0}) == alone
    assert measured("pulled", {"name": DITTO, "lam": 1.0}) != alone


def test_a_model_of_its_own_needs_data_that_the_client_holds_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"measures a model of its own at each client, but no client holds"):
        experiment({"name": DITTO}).run(tmp_path / "run")
