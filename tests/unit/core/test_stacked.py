"""Trees of clients that were computed together: checked, counted and added up as each would be by itself."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from fedlens.core.protocol import Reduce
from fedlens.core.reduction import add_columns, add_reply, add_rows
from fedlens.core.schema import TreeField, nbytes
from fedlens.core.stacked import StackedRow, StackedTrees, row_of, stack_of

FIELD = TreeField({"w": ((2, 2), torch.float32), "b": ((), torch.float32)})


def stacked() -> StackedTrees:
    g = torch.Generator().manual_seed(0)
    return StackedTrees({"w": torch.randn(4, 2, 2, generator=g), "b": torch.randn(4, generator=g)})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_the_row_that_is_not_finite_is_refused_alone(leaf: str, bad: float) -> None:
    trees = stacked()
    trees.leaves[leaf].view(4, -1)[2, 0] = bad
    faults = [FIELD.fault("update", row) for row in trees.rows()]
    assert faults == [None, None, "update holds NaN or Inf", None]
    assert faults == [FIELD.fault("update", dict(row)) for row in trees.rows()]


def test_a_sum_that_overflows_is_no_fault() -> None:
    trees = StackedTrees({"w": torch.full((2, 2, 2), 3e38), "b": torch.zeros(2)})
    assert [FIELD.fault("update", row) for row in trees.rows()] == [None, None]


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ({"w": torch.zeros(3, 2, 2)}, "update lacks b"),
        ({"w": torch.zeros(3, 2, 2), "b": torch.zeros(3), "c": torch.zeros(3)}, "update has an extra c"),
        ({"w": torch.zeros(3, 2), "b": torch.zeros(3)}, "update.w has shape (2,) where (2, 2) is expected"),
        ({"w": torch.zeros(3, 2, 2), "b": torch.zeros(3).double()}, "update.b is torch.float64"),
    ],
)
def test_another_shape_is_told_as_of_any_tree(leaves, said: str) -> None:
    assert said in (FIELD.fault("update", StackedTrees(leaves).rows()[1]) or "")


def test_a_row_is_counted_and_sent_without_the_others() -> None:
    row = stacked().rows()[3]
    assert nbytes({"update": row}) == nbytes({"update": dict(row)}) == 20
    alone = pickle.loads(pickle.dumps(row))
    assert type(alone) is dict
    assert alone["w"].untyped_storage().nbytes() == 16
    assert torch.equal(alone["w"], row["w"])


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 3, 1], [2], [3, 0, 2, 1]])
def test_a_block_is_added_up_as_one_after_the_other_and_others_are_not_looked_at(places: list[int]) -> None:
    trees, reduce = stacked(), Reduce({"update": "sum", "more": "plain", "n": "sum", "top": "max"})
    for k in set(range(4)) - set(places):
        trees.leaves["w"][k] = math.nan
    rows = trees.rows()
    payloads = [
        {"update": rows[k], "more": rows[k], "n": k + 1.0, "weight": 0.5 + k, "top": {"c": torch.tensor(k)}}
        for k in places
    ]
    one: dict = {}
    many: dict = {}
    for payload in payloads:
        add_reply(one, reduce, {**payload, "update": dict(payload["update"]), "more": dict(payload["more"])})
    add_rows(many, reduce, payloads[:1])
    if payloads[1:]:
        add_rows(many, reduce, payloads[1:])
    torch.testing.assert_close(many, one)


def test_rows_of_several_stacks_are_no_stack() -> None:
    a, b = stacked().rows(), stacked().rows()
    assert stack_of([a[0], a[2]]) is a[0].stacked
    assert stack_of([a[0], b[0]]) is None
    assert stack_of([a[0], dict(a[1])]) is None
    assert stack_of([]) is None
    assert isinstance(a[0], StackedRow)
    reduce = Reduce({"x": "sum"})
    total: dict = {}
    add_rows(total, reduce, [{"x": a[0], "weight": 1.0}, {"x": b[1], "weight": 2.0}])
    torch.testing.assert_close(total["x"]["w"], a[0]["w"] + 2 * b[1]["w"])


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 0]])
def test_columns_are_added_up_as_their_payloads_to_the_bit(rows: list[int]) -> None:
    trees, same = stacked(), {"m": torch.tensor([0.1, 0.7])}
    columns = {
        "update": trees,
        "buffers": same,
        "none": {},
        "weight": [1.0, 3.0, 0.3, 7.0],
        "n": [4.0, 5.0, 6.0, 7.0],
    }
    reduce = Reduce({"update": "sum", "buffers": "sum", "none": "max", "n": "plain"})
    by_payload, by_column = {}, {}
    for _ in range(2):
        add_rows(by_payload, reduce, [row_of(columns, row) for row in rows])
        add_columns(by_column, reduce, columns, rows)
    assert by_payload.keys() == by_column.keys()
    assert (by_payload["replies"], by_payload["weight"]) == (by_column["replies"], by_column["weight"])
    assert (by_payload["n"], by_payload["none"]) == (by_column["n"], by_column["none"])
    for name in ("update", "buffers"):
        assert all(torch.equal(value, by_column[name][leaf]) for leaf, value in by_payload[name].items())
