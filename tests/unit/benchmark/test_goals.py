"""The goals are held against the right rows, and are met only where the whole interval says so."""

from __future__ import annotations

import pytest

from benchmarks.goals import Goal, goals_of
from fedlens.benchmark.comparison import ComparisonRow, Ratio, ratio
from fedlens.benchmark.interleave import Kind

OWN = (1.0, 1.1, 0.9)


def row(name: str, kind: Kind, seconds: float, **about: object) -> ComparisonRow:
    return ComparisonRow("load", name, kind, about, seconds=(seconds, seconds, seconds))


def test_of_convolutions_both_layouts_of_the_limit_and_of_each_peer_count() -> None:
    rows = [
        row("limit, contiguous", "limit", 1.3, layout="contiguous"),
        row("limit", "limit", 0.98, layout="channels last"),
        ComparisonRow("load", "fedlens by default", "fedlens", {"default": True}, seconds=OWN),
        row("fedlens processes", "fedlens", 0.5),
        row("pfl 1", "peer", 1.4, layout="contiguous", peer="pfl 1"),
        row("pfl 1, channels last", "peer", 1.2, layout="channels last", peer="pfl 1"),
        ComparisonRow("load", "Gone 2", "peer", reason="it is not here"),
    ]
    assert [(goal.reference, goal.least, goal.measured) for goal in goals_of(rows)] == [
        ("limit", 0.97, ratio((0.98,) * 3, OWN)),
        ("limit, contiguous", 1.2, ratio((1.3,) * 3, OWN)),
        ("pfl 1, as documented", 1.15, ratio((1.4,) * 3, OWN)),
        ("pfl 1, in its best layout", 0.97, ratio((1.2,) * 3, OWN)),
    ]
    assert {goal.engine for goal in goals_of(rows)} == {"fedlens by default"}


def test_of_the_linear_model_the_product_written_by_hand_counts() -> None:
    rows = [
        row("limit", "limit", 5.0, layout="contiguous"),
        row("bmm by hand", "by hand", 0.7, layout="contiguous"),
        row("fedlens by default", "fedlens", 3.0, default=True),
        row("fedlens vectorized", "fedlens", 1.0),
        row("pfl 0.6.0", "peer", 12.0, layout="contiguous"),
        row("Flower 1.41.0", "peer", 49.0, layout="contiguous"),
        row("FedLab 1", "peer", 2.0, layout="contiguous"),
        row("BlazeFL 2, threads", "peer", 1.1, layout="contiguous"),
    ]
    goals = goals_of(rows)
    assert [(goal.reference, goal.least, goal.met) for goal in goals] == [
        ("bmm by hand", 0.6, "yes"),
        ("pfl 0.6.0", 10.0, "yes"),
        ("Flower 1.41.0", 50.0, "no"),
        ("FedLab 1", 1.15, "yes"),
        ("BlazeFL 2, threads", 1.15, "no"),
    ]
    assert {goal.engine for goal in goals} == {"fedlens vectorized"}  # the default trains one after the other
    assert goals[0].measured.median == pytest.approx(0.7)


def test_without_fedlens_there_is_no_goal() -> None:
    assert goals_of([row("limit", "limit", 1.0, layout="contiguous")]) == []


@pytest.mark.parametrize(
    ("low", "high", "met"), [(0.97, 1.1, "yes"), (0.9, 0.96, "no"), (0.9, 1.1, "within noise")]
)
def test_a_goal_is_met_where_the_whole_interval_is(low: float, high: float, met: str) -> None:
    assert Goal("load", "fedlens by default", "limit", 0.97, Ratio((low + high) / 2, low, high)).met == met
