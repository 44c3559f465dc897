"""The bound of a reply's norm: from which replies it comes, and when it applies."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
import torch

from fedlens.core.calls import StackedOutcomes
from fedlens.core.driver import Driver
from fedlens.core.norm_bounds import FIRST, KEPT, NormBounds, NormSample
from fedlens.core.protocol import Answer, Ask, Failure, Id, Reply, Request
from fedlens.core.schema import NORM_LIMIT, Schema, TreeField
from fedlens.core.stacked import StackedTrees
from fedlens.core.states import ClientStates
from fedlens.core.tree import finite_norm


def accept(bounds: NormBounds, *norms: float, op: str = "train", client: Any = 0) -> NormBounds:
    for norm in norms:
        bounds.answered(op, Reply(Id(1, 0, 0), client, {}, norms={"update": norm}))
    return bounds


def typical(bounds: NormBounds, op: str = "train", client: Any = 0) -> dict[str, float]:
    return dict(bounds.bounded(Ask(op, [Request(client)])).expect.typical)


def test_the_bound_begins_with_the_twentieth_reply_and_is_the_median() -> None:
    bounds = accept(NormBounds(), *range(1, FIRST))
    assert typical(bounds) == {}
    assert typical(accept(bounds, 1000.0)) == {"update": 10.5}
    assert typical(bounds, op="gradient") == {}  # each operation by itself
    assert typical(bounds, client="@train") == {}  # the server's own data
    assert typical(accept(NormBounds(), *[1.0] * 30, client="@train")) == {}


def test_the_bound_never_falls_and_clients_that_did_not_move_do_not_count() -> None:
    bounds = accept(NormBounds(), *[8.0] * FIRST)
    assert typical(bounds) == {"update": 8.0}
    assert typical(accept(bounds, *[1e-9] * 500)) == {"update": 8.0}
    assert typical(accept(bounds, *[20.0] * 2000)) == {"update": 20.0}
    assert typical(accept(NormBounds(), *[0.0] * 500, *[3.0] * (FIRST - 1))) == {}


@pytest.mark.parametrize("count", [KEPT - 1, KEPT, KEPT + 1, 10 * KEPT + 7])
def test_the_sample_is_bounded_and_even(count: int) -> None:
    sample = NormSample()
    for norm in range(count):
        sample.add(float(norm))
    assert len(sample.norms) < KEPT
    assert sample.norms == [float(norm) for norm in range(0, count, sample.every)]


def test_norms_go_through_a_checkpoint_and_a_copy_stays_as_it_was() -> None:
    bounds = accept(NormBounds(), *range(1, 400))
    typical(bounds)
    payload = bounds.payload()
    before = json.dumps(payload)
    again = NormBounds.of(json.loads(before))
    assert typical(again) == typical(bounds)
    accept(bounds, 5.0, 6.0)
    accept(again, 5.0, 6.0)
    assert again.payload() == bounds.payload()
    assert json.dumps(payload) == before


def test_the_norm_of_a_finite_tree_is_finite_whatever_it_holds() -> None:
    assert finite_norm([torch.full((4,), 3e38)]) == pytest.approx(6e38)
    assert finite_norm([torch.full((2,), 1e308, dtype=torch.float64)]) == pytest.approx(2**0.5 * 1e308)
    assert finite_norm([torch.full((4,), 6e4, dtype=torch.float16)]) == pytest.approx(1.2e5, rel=1e-3)
    assert finite_norm([torch.full((9,), 1.7e308, dtype=torch.float64)]) < float("inf")
    assert finite_norm([torch.tensor(3), torch.empty(0)]) == 0.0
    for bad in (float("nan"), float("inf")):
        assert not torch.tensor(finite_norm([torch.full((2,), 3e38), torch.tensor([1.0, bad])])).isfinite()


def test_a_row_of_several_has_the_norm_that_it_has_alone() -> None:
    leaves = {"w": torch.randn(3, 5, 2), "b": torch.randn(3), "n": torch.ones(3, 1, dtype=torch.int64)}
    leaves["w"][1] *= 1e38
    stacked = StackedTrees(leaves)
    alone = [finite_norm(list(row.values())) for row in stacked.rows()]
    assert stacked.norms == pytest.approx(alone, rel=1e-6)
    assert stacked.norms[1] > 1e38


FIELD = TreeField({"w": ((2,), torch.float32)})


def test_of_clients_computed_together_the_one_beyond_the_bound_does_not_pass() -> None:
    schema = Schema({"update": FIELD}, {"update": 1.0})
    trees = StackedTrees({"w": torch.tensor([[1.0, 0.0], [2 * NORM_LIMIT, 0.0], [NORM_LIMIT, 0.0]])})
    outcomes = StackedOutcomes({"update": trees}, {}, [0, 1, 2])
    assert schema.passing(outcomes.payload, 3) == [True, False, True]
    said = "update norm 2e+04 is 20,000 times the median of accepted replies (limit: 10,000 times)"
    assert [schema.fault(outcome.payload) for outcome in outcomes] == [None, said, None]
    shared = {"update": {"w": torch.tensor([2 * NORM_LIMIT, 0.0])}}
    assert schema.passing(shared, 2) == [False, False]


class Fixed:
    """An engine whose clients send updates of fixed norms, checked as engines do."""

    def __init__(self, norms: list[list[float]]) -> None:
        self.norms = iter(norms)

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        for slot, norm in enumerate(next(self.norms)):
            id, client = Id(round, exchange, slot), ask.requests[slot].client
            fault, norms = ask.expect.check({"update": {"w": torch.tensor([norm])}})
            yield Failure(id, client, fault) if fault else Reply(id, client, {}, norms=norms)


def test_only_accepted_replies_of_training_count() -> None:
    def asking(refused: bool = False) -> Generator[Ask, Any, None]:
        for answer in (yield Ask("train", [Request(k) for k in range(FIRST)])):
            if refused and isinstance(answer, Reply):
                answer.refuse("not wanted")

    huge = [1.0] * (FIRST - 1) + [1e9]
    driver = Driver(Fixed([huge, huge, [1.0] * FIRST, huge]), ClientStates())  # type: ignore[arg-type]
    driver.drive(asking(refused=True), 1)
    driver.begin(asking(), 2, ahead=False).finish()  # an evaluation
    assert driver.tally.norms
    driver.drive(asking(), 3)
    assert driver.tally.failures.keys() == {*range(FIRST)}
    driver.drive(asking(), 4)
    assert driver.tally.failures[FIRST - 1].popitem()[0].startswith("update norm 1e+09 is 10^9 times")


def refused(bounds: NormBounds, op: str = "train") -> None:
    bounds.answered(
        op, Failure(Id(1, 0, 0), 0, Schema(typical={"u": 1.0}).fault({"u": torch.tensor([1e6])}) or "")
    )


@pytest.mark.parametrize(
    ("moved", "norm", "replied", "anew"),
    [
        (True, 8.0, True, []),  # one reply was good: the others are broken clients
        (True, 0.0, True, ["train"]),  # a client that did not move says nothing about the scale
        (False, 0.0, True, ["train"]),  # another operation had the good replies
        (True, 8.0, False, ["train"]),  # asked twice: the second time, no reply was good
    ],
)
def test_a_round_in_which_every_reply_is_beyond_the_bound_starts_the_norms_anew(
    moved: bool, norm: float, replied: bool, anew: list[str]
) -> None:
    bounds = accept(accept(NormBounds(), *[8.0] * FIRST), *[8.0] * FIRST, op="gradient")
    assert bounds.round_done(replied=True) == []
    refused(bounds)
    if moved:
        accept(bounds, norm)
    assert bounds.round_done(replied) == anew
    assert typical(bounds) == ({} if anew else {"update": 8.0})
    assert typical(bounds, op="gradient") == {"update": 8.0}
    assert bounds.round_done(replied) == [], "it is the count of one round"


def test_other_failures_leave_the_norms() -> None:
    bounds = accept(NormBounds(), *[8.0] * FIRST)
    bounds.round_done(replied=True)
    bounds.answered("train", Failure(Id(2, 0, 0), 0, "update holds NaN or Inf"))
    assert bounds.round_done(replied=False) == []
    assert typical(bounds) == {"update": 8.0}
