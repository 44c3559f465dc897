"""Every documented aggregate with every client rule: it learns, or it is refused in one sentence."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fedlens.aggregate.mean import AGGREGATES
from fedlens.algorithms.registry import ALGORITHMS as REGISTERED
from fedlens.algorithms.registry import RULES
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError
from tests.contract.contract_kit import (
    ALGORITHMS,
    HELD_OUT,
    PATTERNS,
    PERSONAL,
    USERS,
    WITHOUT_SELECT,
    Stopping,
    outcome,
    weights,
)

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
OWN = f"{EXAMPLES}/own_aggregate.py"

AGGREGATED: dict[str, dict[str, Any]] = {
    "mean": {"name": "mean"},
    "normalized": {"name": "normalized"},
    "optimal-convex": {"name": "optimal-convex", "epochs": 2, "starts": 1},
    "quantized": {"name": "quantized", "bits": 30, "range": 64.0},
    "secagg": {"name": "secagg", "bits": 30, "range": 64.0},
    "secagg-plus": {"name": "secagg-plus"},
    "lightsecagg": {"name": "lightsecagg", "bits": 27, "range": 64.0},
    "turbo-aggregate": {"name": "turbo-aggregate"},
    "Median": {"name": f"{OWN}:Median"},
    "GeometricMedian": {"name": f"{OWN}:GeometricMedian"},
    "CenteredClipping": {"name": f"{OWN}:CenteredClipping", "radius": 2.0},
    "top_k": {"name": f"{EXAMPLES}/top_k.py:top_k", "share": 0.5},
    "loss_weighted": {"name": f"{EXAMPLES}/loss_weighted.py:loss_weighted"},
}
# As rules of `[client]`, and those that come with an algorithm alone.
RULED: dict[str, dict[str, Any]] = {
    "plain": {"client": "plain"},
    "proximal": {"client": {"name": "proximal", "mu": 0.1}},
    "contrastive": {"client": {"name": "contrastive", "mu": 0.1}},
    "reweighted": {"client": "reweighted"},
    "control-variate": {"client": "control-variate"},
    "dynamic": {"client": {"name": "dynamic", "alpha": 0.1}},
    "dual": {"client": "dual"},
    **{f"own {name}": {"client": f"{EXAMPLES}/own_rules.py:{name}"} for name in ("pulled", "smoothed", "noisy")},
    "sign_flip": {"client": {"name": f"{EXAMPLES}/sign_flip.py:sign_flip", "clients": [0], "scale": 0.1}},
    **{
        name: {"algorithm": ALGORITHMS.get(name, name)}
        for name in REGISTERED
        if name not in (*WITHOUT_SELECT, "fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi")
    },
    "clipped": {"algorithm": {"name": f"{EXAMPLES}/clipped_fedavg.py:clipped_fedavg", "norm": 5.0}},
    "ditto": {"algorithm": f"{EXAMPLES}/ditto.py:ditto", "evaluation": {"clients": "none"}},
}  # fmt: skip
COMMON = {
    "fednova",
    "local-only",
    "fedgkt",
    "fednas",
    "fedma",
    "splitfed",
    "split-relay",
}  # two fix the aggregate, the others send no updates
OWN_UPDATE = {"dual", "own noisy", "sign_flip", "clipped", "admm", "ceadmm", "iceadmm", "liadmm"}
REFUSED = dict.fromkeys(AGGREGATED, COMMON) | {
    "normalized": OWN_UPDATE | COMMON - {"fednova"},
    "optimal-convex": COMMON
    | OWN_UPDATE
    | PERSONAL
    | {"control-variate", "dynamic", "scaffold", "feddyn", "mimelite"},
}
REFUSED["quantized"] = (
    COMMON | PERSONAL | {"finetune", "mime", "feddane", "admm", "ceadmm", "iceadmm", "liadmm", "ditto"}
)
REFUSED["secagg"] = REFUSED["lightsecagg"] = REFUSED["quantized"]
REFUSED["secagg-plus"] = REFUSED["turbo-aggregate"] = set(RULED)  # the cohorts of the table are too small
PAIRS = list(product(AGGREGATED, RULED))
# In the ci tier every aggregate and every rule comes up, in turn; and SCAFFOLD with the median.
TURN = [(list(AGGREGATED)[at % len(AGGREGATED)], rule) for at, rule in enumerate(RULED)]
CHOSEN = {*TURN, ("Median", "scaffold")}


def experiment(aggregate: str, rule: str, **more: Any) -> Experiment:
    """Five clients and a model with batch normalization; the server holds validation data."""
    data: dict[str, Any] = {"dataset": PATTERNS, "partition": {"name": "iid", "clients": 5}}
    data |= HELD_OUT if rule in PERSONAL else {"validation": 0.1}
    common: dict[str, Any] = {
        "rounds": 4, "model": {"name": f"{USERS}:norm_net"}, "data": data, "engine": "inline",
        "local": {"lr": 0.05, "batch_size": 20}, "select": {"clients_per_round": 4},
        "record": {"clients": not AGGREGATES.find(aggregate)().blind if aggregate in AGGREGATES else True},
    }  # fmt: skip
    return Experiment(**common | RULED[rule] | {"aggregate": AGGREGATED[aggregate]} | more)


def test_the_table_has_every_aggregate_and_every_rule() -> None:
    assert set(AGGREGATED) >= set(AGGREGATES)
    assert set(RULED) >= set(RULES)
    classes = [line.split("(")[0].removeprefix("class ") for line in Path(OWN).read_text().splitlines()]
    assert {name for name in classes if name in AGGREGATED} == {
        "Median",
        "GeometricMedian",
        "CenteredClipping",
    }
    assert {rule for _, rule in TURN} == set(RULED)
    assert {aggregate for aggregate, _ in TURN} == set(AGGREGATED)


@pytest.mark.parametrize(
    ("aggregate", "rule"),
    [pair if pair in CHOSEN else pytest.param(*pair, marks=pytest.mark.nightly) for pair in PAIRS],
)
def test_it_learns_or_is_refused_in_a_sentence(aggregate: str, rule: str, tmp_path: Path) -> None:
    made = experiment(aggregate, rule)
    if rule in REFUSED[aggregate]:
        with pytest.raises(ConfigError) as refused:
            made.run(tmp_path / "run", report=False)
        assert "\n" not in str(refused.value)
        assert refused.value.hint
        return
    result = made.run(tmp_path / "run", report=False)
    losses = [line["validation_loss" if rule in PERSONAL else "test_loss"] for line in result.metrics]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.1
    assert result.summary["totals"]["failed"] == 0


def test_an_aggregate_with_a_state_resumes_exactly(tmp_path: Path) -> None:
    made = experiment("CenteredClipping", "scaffold").with_settings(
        "aggregate.radius=0.2"
    )  # the state counts
    whole = outcome(made.run(tmp_path / "whole", report=False))
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "stopped", report=False, progress=Stopping(2))
    assert outcome(resume(tmp_path / "stopped")) == whole


def test_a_secure_sum_resumes_to_the_bits_of_the_sum_without_masks(tmp_path: Path) -> None:
    plain = experiment("quantized", "scaffold").run(tmp_path / "plain", report=False)
    with pytest.raises(KeyboardInterrupt):
        experiment("secagg", "scaffold").run(tmp_path / "stopped", report=False, progress=Stopping(2))
    secure = resume(tmp_path / "stopped")
    assert weights(secure) == weights(plain)
    for name in ("test_loss", "local_loss", "examples", "batches_max"):
        assert [line.get(name) for line in secure.metrics] == [line.get(name) for line in plain.metrics]
