"""Search with Optuna: reproducible batches that continue after a kill."""

import builtins
import math
import random
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.studies.optuna_search import BATCH, OptunaSearch
from fedlens.studies.point_search import SearchRules, searched
from tests.unit.studies.fake_study import FakeCell, Point, line_of, played, played_with_kills

SPACE = {
    "local.lr": {"low": 1e-3, "high": 1.0, "log": True},
    "local.epochs": {"low": 1, "high": 8},
    "local.optimizer": {"choices": ["sgd", "adam"]},
}
CELL = FakeCell([], seeds=(0, 1), space=SPACE, rounds=2)
TUNING = SearchRules(search="optuna", points=14)


def _value(point: Point, seed: int, round: int) -> float | None:
    if point["local.lr"] > 0.8:
        return None
    return (
        -abs(math.log10(point["local.lr"] / 0.03)) - 0.1 * (point["local.optimizer"] == "adam") + 0.01 * seed
    )


def test_the_budget_is_spent_in_batches_within_the_ranges() -> None:
    first = searched(CELL, TUNING, {})
    assert len(first.due) == BATCH * 2
    outcome, lines = played(CELL, TUNING, _value)
    assert len(outcome.tried) == 14
    assert len(lines) == 28
    for point in outcome.tried:
        assert 1e-3 <= point["local.lr"] <= 1
        assert point["local.lr"] == float(f"{point['local.lr']:.4g}")
        assert type(point["local.epochs"]) is int
        assert 1 <= point["local.epochs"] <= 8
        assert point["local.optimizer"] in ("sgd", "adam")


def test_the_best_of_all_points_is_chosen() -> None:
    outcome, _ = played(CELL, TUNING, _value)
    values = [(_value(point, 0, 2), point) for point in outcome.tried]
    assert outcome.chosen == max((one for one in values if one[0] is not None), key=lambda one: one[0])[1]


def test_later_points_depend_on_the_values_of_earlier_ones() -> None:
    low, _ = played(CELL, TUNING, lambda point, seed, round: -point["local.lr"])
    high, _ = played(CELL, TUNING, lambda point, seed, round: point["local.lr"])
    assert low.tried[:8] == high.tried[:8]
    assert low.tried[8:] != high.tried[8:]


def test_a_killed_search_continues_with_the_same_points() -> None:
    whole = played(CELL, TUNING, _value)
    rng = random.Random(3)
    for _ in range(3):
        assert played_with_kills(CELL, TUNING, _value, rng) == whole


def test_a_half_finished_batch_keeps_its_points() -> None:
    first = searched(CELL, TUNING, {})
    lines = {one.run.digest: line_of(one, 2, _value) for one in first.due[:3]}
    then = searched(CELL, TUNING, lines)
    assert then.tried == first.tried
    assert [one.run.digest for one in then.due] == [one.run.digest for one in first.due[3:]]


@pytest.mark.parametrize("table", [{"low": 1}, {"low": 0.0, "high": 1.0, "log": True}, {"low": 2, "high": 1}])
def test_a_range_that_is_none_is_refused_with_its_setting(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'local\.lr'"):
        OptunaSearch({"local.lr": table})


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to search"):
        OptunaSearch({})


def test_a_missing_optuna_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "optuna":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"fedlens\[search\]"):
        OptunaSearch(SPACE)


def test_a_point_with_a_failed_run_is_told_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float | None] = []
    real = OptunaSearch.tell
    monkeypatch.setattr(OptunaSearch, "tell", lambda self, values: told.extend(values) or real(self, values))
    _, lines = played(CELL, TUNING, lambda p, s, r: None if s else 0.5)
    assert set(told) == {None}
    assert {line.status for line in lines.values()} == {"finished", "failed"}
