"""The contract table on Ray's workers: weights, metrics and client states are those of `inline`, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.core.driver import Driver
from tests.contract.contract_kit import experiment, outcome
from tests.unit.engines.ray_kit import NEEDS_RAY, all_ready, fresh

pytestmark = [NEEDS_RAY, pytest.mark.nightly]
RAY = {"name": "ray", "workers": 2, "cpus": 0.4, "connect_timeout": 300.0}
# `processes` runs all algorithms in ci, and test_ray.py of the engines two exchanges, states and a file of one's own.
KINDS = [
    "fedavg",
    "feddane",
    "fedbn",
    "remembering",
    "fedvc",
    "fedir-population",
    "mime-adam",
    "fednova",
    "moon",
    "admm",
    "dsgd",
    "push-sum",
    "gradient-tracking",
    "fedgkt",
    "fedma",
    "splitfed",
    "splitfed-v2",
    "splitfed-two-cuts",
    "split-relay",
]


@pytest.fixture(scope="module")
def _ray() -> Iterator[Driver]:
    """A local Ray for the whole file, which the runs' own engines join."""
    with fresh(cpus=0.2) as made:
        all_ready(made)
        yield made


@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("algorithm", KINDS)
def test_a_cluster_gives_the_bits_of_inline(algorithm: str, tmp_path: Path) -> None:
    """With dropout, batch normalization, augmentation, a frozen layer and momentum in one."""
    inline = experiment(algorithm, "dirichlet", rounds=2).run(tmp_path / "inline")
    spread = experiment(algorithm, "dirichlet", rounds=2, engine=RAY).run(tmp_path / "ray")
    assert outcome(inline) == outcome(spread)
