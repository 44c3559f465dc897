"""Simulated hours of a run, by hand."""

from __future__ import annotations

import pytest

from fedlens.report.study_clock import simulated_hours
from fedlens.report.study_results import RunLine

CLOCK = {"images_per_second": 50.0, "up_mbit": 1.0, "down_mbit": 8.0}
CURVE = {"round": [5, 10], "batches": [100, 250], "bytes_client": [2e6, 4e6]}


def line(curve: dict[str, list[float]], **facts: float) -> RunLine:
    return RunLine("d", "r", "finished", None, 10, "test_accuracy", curve, facts)


def test_training_and_both_ways_of_the_link_add_up() -> None:
    # 100 batches of 20 at 50 a second are 40 s; 8 Mbit up at 1 Mbit/s are 8 s; 8 Mbit down at 8 Mbit/s are 1 s.
    hours = simulated_hours(line(CURVE, batch_size=20), CLOCK)
    assert hours == pytest.approx([49 / 3600, 118 / 3600], rel=1e-12)


def test_the_bytes_up_are_counted_as_such_where_they_are_recorded() -> None:
    curve = {**CURVE, "bytes_client_up": [0.0, 0.0]}
    hours = simulated_hours(line(curve, batch_size=20), CLOCK)
    assert hours == pytest.approx([(40 + 2) / 3600, (100 + 4) / 3600], rel=1e-12)


def test_a_speed_that_is_missing_takes_no_time() -> None:
    assert simulated_hours(line(CURVE), {"up_mbit": 1.0}) == pytest.approx([8 / 3600, 16 / 3600])


@pytest.mark.parametrize("curve", [CURVE, {"round": [5, 10], "bytes_client": [1.0, 2.0]}])
def test_without_batch_size_or_batches_there_are_no_hours(curve: dict[str, list[float]]) -> None:
    assert simulated_hours(line(curve), CLOCK) == [None, None]


def test_without_a_clock_there_are_no_hours() -> None:
    assert simulated_hours(line(CURVE, batch_size=20), {}) == [None, None]
