"""Normalized averaging: what it folds, and over whom."""

import pytest
import torch

from fedlens.aggregate.mean import AGGREGATES, Mean
from fedlens.aggregate.normalized import Normalized
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.protocol import Failure, Id, Reply

FIELDS = {"tau": "mean", "extra": "sum"}


def reply(slot: int, weight: float, direction: float, tau: float) -> Reply:
    one = torch.tensor([direction], dtype=torch.float64)
    payload = {"update": {"w": one}, "buffers": {"b": one * 10}, "counters": {"c": torch.tensor(slot)}}
    return Reply(Id(1, 0, slot), slot, {**payload, "weight": weight, "tau": tau, "extra": tau})


REPLIES = [reply(0, 1.0, 4.0, 2.0), Failure(Id(1, 0, 1), 1, "away"), reply(2, 3.0, 8.0, 6.0)]


@pytest.mark.parametrize(("tau_eff", "expected"), [("mean", 7.0 * 5.0), (2.0, 14.0)])
def test_the_mean_direction_times_tau_eff_over_those_that_replied(tau_eff, expected: float) -> None:
    update = Normalized(tau_eff=tau_eff).aggregate(REPLIES, FIELDS)
    assert update.update["w"].item() == pytest.approx(expected)  # (4 + 24) / 4, times (2 + 18) / 4
    assert update.buffers["b"].item() == pytest.approx(70.0)
    assert update.counters["c"].item() == 2
    assert update.more["extra"] == 8.0
    assert (update.replies, update.weight) == (2, 4.0)


def test_where_no_one_replied_there_is_no_update() -> None:
    assert Normalized().aggregate([REPLIES[1]], FIELDS) is None


def test_it_reduces_where_the_work_ran_as_the_mean_does() -> None:
    for cohort in (3, 64, 100, 500):
        assert Normalized("uniform").reduce(cohort, FIELDS) == Mean("uniform").reduce(cohort, FIELDS)
    assert Normalized().reduce(64, FIELDS).fields["tau"] == "sum"


def test_the_table_and_what_it_refuses() -> None:
    factory = AGGREGATES.find("normalized")
    assert factory() == Normalized("examples", "mean")
    assert factory(weighting="uniform", tau_eff=3.0) == Normalized("uniform", 3.0)
    assert read_settings(factory, {"tau_eff": 12}, "aggregate")["tau_eff"] == 12.0
    for wrong in (0, -1.0, float("inf"), "median"):
        with pytest.raises(ConfigError) as caught:
            read_settings(factory, {"tau_eff": wrong}, "aggregate")
        assert caught.value.where.startswith("aggregate.tau_eff")
