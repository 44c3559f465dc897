"""The weighted mean: any cohort, any blocks, failures anywhere."""

import pytest
import torch

from fedlens.aggregate.mean import AGGREGATES, Mean
from fedlens.core.protocol import Failure, Id, Reply
from fedlens.engines.executor import Reduction


def reply(slot: int, weight: float) -> Reply:
    g = torch.Generator().manual_seed(slot)
    draw = torch.randn(3, generator=g, dtype=torch.float64)
    return Reply(
        Id(1, 0, slot),
        slot,
        {
            "update": {"w": draw, "b": draw[:1].clone()},
            "buffers": {"m": draw.abs()},
            "counters": {"n": torch.tensor(slot % 7)},
            "weight": weight,
        },
    )


def answers(mean: Mean, cohort: int, failed: set[int]) -> list:
    """What an engine gives: every reply, or blocks of neighbouring slots, each folded in its last answer."""
    given = [
        Failure(Id(1, 0, slot), slot, "lost") if slot in failed else reply(slot, 1.0 + slot % 5)
        for slot in range(cohort)
    ]
    reduce = mean.reduce(cohort)
    if reduce is None:
        return given
    out = []
    for start in range(0, cohort, reduce.block):
        block = Reduction(reduce)
        row = [block.take(answer) for answer in given[start : start + reduce.block]]
        row[-1].reduced = block.result()
        out += row
    return out


@pytest.mark.parametrize("cohort", [1, 2, 63, 64, 95, 96, 130])
@pytest.mark.parametrize("lost", ["none", "first", "last of a block", "most"])
def test_any_cohort_with_any_failures(cohort: int, lost: str) -> None:
    failed = {
        "none": set(),
        "first": {0},
        "last of a block": set(range(1, cohort, 4)),
        "most": set(range(cohort)) - {cohort // 2},
    }[lost]
    folded = Mean().aggregate(answers(Mean(), cohort, failed))
    there = [reply(slot, 1.0 + slot % 5).payload for slot in range(cohort) if slot not in failed]
    if not there:
        assert folded is None
        return
    total = sum(p["weight"] for p in there)
    for kind, tree in (("update", folded.update), ("buffers", folded.buffers)):
        for name, value in tree.items():
            expected = sum(p["weight"] / total * p[kind][name] for p in there)
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
    assert folded.counters["n"] == max(int(p["counters"]["n"]) for p in there)
    assert folded.counters["n"].dtype == torch.int64


def test_a_block_in_which_all_failed_adds_nothing() -> None:
    mean = Mean()
    folded = mean.aggregate(answers(mean, 70, {0, 1, 68, 69}))
    assert folded is not None
    assert mean.aggregate(answers(mean, 70, set(range(70)))) is None
    assert mean.aggregate([]) is None


def test_replies_are_not_changed_by_aggregation() -> None:
    pair = [reply(0, 2.0), reply(1, 3.0)]
    before = [r.payload["update"]["w"].clone() for r in pair]
    block = Reduction(Mean().reduce(64))
    taken = [block.take(answer) for answer in pair]
    assert all(set(answer.payload) == {"weight"} for answer in taken)
    Mean().aggregate(pair)
    assert all(torch.equal(r.payload["update"]["w"], b) for r, b in zip(pair, before, strict=True))


def test_the_tree_of_additions_depends_on_the_cohort_alone() -> None:
    reduced = {n: Mean().reduce(n) for n in (1, 10, 63, 64, 100, 1000)}
    assert {n: r and r.block for n, r in reduced.items()} == {
        1: None,
        10: None,
        63: None,
        64: 2,
        100: 3,
        1000: 31,
    }


def test_a_model_without_statistics_has_none_after_aggregation() -> None:
    for cohort in (3, 64):
        given = [reply(slot, 2.0) for slot in range(cohort)]
        given = [Reply(r.id, r.client, {**r.payload, "buffers": {}, "counters": {}}) for r in given]
        if reduce := Mean().reduce(cohort):
            block = Reduction(reduce)
            given = [block.take(answer) for answer in given]
            given[-1].reduced = block.result()
        folded = Mean().aggregate(given)
        assert (dict(folded.buffers), dict(folded.counters)) == ({}, {})
        assert set(folded.update) == {"w", "b"}


def test_the_table() -> None:
    assert AGGREGATES.find("mean")(weighting="uniform") == Mean("uniform")
