"""The aggregate `quantized` in runs: its metrics, a resumed run, and what it refuses in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.aggregate.mean import AGGREGATES, Mean
from fedlens.aggregate.normalized import Normalized
from fedlens.aggregate.optimal_convex import OptimalConvex
from fedlens.aggregate.secure.blind_sum import RANGES
from fedlens.aggregate.secure.quantized import Quantized
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError
from fedlens.local.rules import ClientRule
from tests.contract.contract_kit import ALGORITHMS, HELD_OUT, PATTERNS, USERS, Stopping, lines, weights

QUANTIZED = {"name": "quantized"}


class Counting(torch.nn.Module):
    """A layer with a counter of its own."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, classes)
        self.register_buffer("visits", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1))


def counting(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return Counting(torch.Size(input_shape).numel(), classes)


def experiment(aggregate: Any = QUANTIZED, **more: Any) -> Experiment:
    common: dict[str, Any] = {
        "rounds": 3, "model": {"name": f"{USERS}:norm_net"}, "engine": "inline", "algorithm": "fedavg",
        "data": {"dataset": PATTERNS, "partition": {"name": "quantity", "sigma": 0.5, "clients": 5}},
        "local": {"lr": 0.05, "batch_size": 20, "epochs": 2}, "select": {"clients_per_round": 4},
    }  # fmt: skip
    return Experiment(**common | {"aggregate": aggregate} | more)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_the_lines_of_its_rounds_are_those_of_the_plain_aggregate(weighting: str, tmp_path: Path) -> None:
    """Examples and batches follow from public sizes; the loss is weighted as the update."""
    plain = experiment({"name": "mean", "weighting": weighting}).run(tmp_path / "plain", report=False)
    ranges = {"buffers": 16.0, "loss": 16.0}
    made = experiment({**QUANTIZED, "weighting": weighting, "bits": 30, "range": ranges})
    blind = made.run(tmp_path / "blind", report=False)
    for one, other in zip(plain.metrics, blind.metrics, strict=True):
        for name in ("round", "clients", "failed", "examples", "batches_max", "bytes_down"):
            assert one[name] == other[name]
        assert one["test_loss"] == pytest.approx(other["test_loss"], abs=1e-5)
        if one["round"] and weighting == "examples":  # then the weighted mean is that over all examples
            assert one["local_loss"] == pytest.approx(other["local_loss"], abs=1e-5)
    assert blind.summary["totals"]["failed"] == 0
    assert any("without masks" in sentence for sentence in blind.summary["disclosures"])


def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    made = experiment({**QUANTIZED, "range": {"variate": 16.0}}, algorithm="scaffold")
    whole = made.run(tmp_path / "whole", report=False)
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "stopped", report=False, progress=Stopping(2))
    resumed = resume(tmp_path / "stopped")
    assert (weights(resumed), lines(resumed)) == (weights(whole), lines(whole))


FEDNOVA = {"algorithm": "fednova"}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "mime": ({"algorithm": "mime"}, "aggregate.name", "prepares each round"),
    "feddane": ({"algorithm": "feddane"}, "aggregate.name", "prepares each round"),
    "fedir, population": (
        {"algorithm": {"name": "fedir", "target": "population"}},
        "aggregate.name",
        "prepares each round",
    ),
    "iceadmm": ({"algorithm": ALGORITHMS["iceadmm"], "local": {"lr": 0.05}}, "aggregate.name", "a solver of its own"),
    "fedbn": ({"algorithm": "fedbn", "data": HELD_OUT}, "evaluation.clients", "stay at the clients"),
    "finetune": ({"algorithm": "finetune", "data": HELD_OUT}, "evaluation.clients", "each client's tuned model"),
    "poisson": ({"select": {"name": "poisson", "fraction": 0.5}}, "select.name", "cohorts of one size"),
    "evaluation at clients": (
        {"evaluation": {"clients": "all"}, "data": HELD_OUT},
        "evaluation.clients",
        "measures the model at each client",
    ),
    "fednova with a mean": (FEDNOVA, "aggregate.name", "FedNova defines the aggregate"),
    "another aggregate": ({"aggregate": {**QUANTIZED, "of": "optimal-convex"}}, "aggregate.of", "normalized"),
    "tau_eff": ({"aggregate": {**QUANTIZED, "tau_eff": 3.0}}, "tau_eff", "no effect on a mean"),
    "too many bits": ({"aggregate": {**QUANTIZED, "bits": 47}}, "aggregate.bits", "46"),
    "no range": ({"aggregate": {**QUANTIZED, "range": 0.0}}, "aggregate.range", "0"),
    "a range for nothing": (
        {"aggregate": {**QUANTIZED, "range": {"variate": 1.0}}},
        "aggregate.range.variate",
        "clients send no such field",
    ),
    "a field without a range": ({"algorithm": "scaffold"}, "aggregate.range", "clients also send the field 'variate'"),
    "another counter": ({"model": {"name": f"{__file__}:counting"}}, "model", "the counter 'visits'"),
    "record.clients": ({"record": {"clients": True}}, "record.clients", "nothing of single clients"),
    "record.updates": ({"record": {"updates": {"every": 1}}}, "record.updates", "nothing of single clients"),
    "record.local_models": ({"record": {"local_models": {"every": 1}}}, "record.local_models", "single clients"),
}  # fmt: skip


OF_A_SETTING = ("another aggregate", "too many bits", "no range")  # their sentences name the valid values


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses_in_words(case: str, tmp_path: Path) -> None:
    settings, where, words = REFUSED[case]
    data = {
        "data": {"dataset": PATTERNS, "partition": {"name": "iid", "clients": 5}, **settings.pop("data", {})}
    }
    with pytest.raises(ConfigError) as refused:
        experiment(**settings | data).run(tmp_path / "run", report=False)
    assert where in str(refused.value)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.hint or case in OF_A_SETTING
    assert not (tmp_path / "run").exists()


def test_a_rule_of_a_users_own_that_sends_what_is_not_summed_is_refused() -> None:
    with pytest.raises(ConfigError, match="OptimalConvex needs single replies"):
        Quantized(OptimalConvex())
    assert ClientRule().fields == {}


def test_the_table_and_its_defaults() -> None:
    factory = AGGREGATES.find("quantized")
    assert factory() == Quantized(Mean(), 16, RANGES)
    assert factory(of="normalized", tau_eff=3.0, weighting="uniform") == Quantized(Normalized("uniform", 3.0))
    assert RANGES == {"update": 1.0, "buffers": 1024.0, "loss": 64.0}
