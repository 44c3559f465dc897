from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlens.base import format as told
from fedlens.base.format import smaller_is_better
from fedlens.tasks.registry import TASKS

FORMATS = [told.percent, told.number, told.count, told.size, told.duration]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_known_is_a_dash(form: object, value: float | None) -> None:
    assert callable(form)
    assert form(value) == told.MISSING


@given(st.floats(min_value=0, max_value=1e15))
def test_every_number_has_a_short_text(value: float) -> None:
    for form in FORMATS[1:]:
        assert 0 < len(form(value)) < 22


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (61, "1 min 1 s"),
        (3599.6, "1 h"),
        (86400, "1 d"),
    ],
)
def test_durations_at_the_edges(seconds: float, text: str) -> None:
    assert told.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999.4, "999 B"), (999.6, "1.0 kB"), (999_960, "1.0 MB"), (123_456, "123 kB")]
)
def test_sizes_at_the_edges(value: float, text: str) -> None:
    assert told.size(value) == text


@pytest.mark.parametrize("key", ["seconds", "test", "test_", "round", "tests_x"])
def test_what_is_no_metric(key: str) -> None:
    assert told.split_of(key) is None


@pytest.mark.parametrize("name", list(TASKS))
def test_the_metrics_of_which_smaller_is_better_are_those_of_the_task(name: str) -> None:
    # A detector gives no loss in evaluation mode, and both of its metrics are scores.
    assert bool(TASKS.find(name)().errors) == (name != "detection")
    task = TASKS.find(name)()
    for metric in task.errors:
        assert smaller_is_better(metric)
    assert task.score is None or not smaller_is_better(task.score)
