"""Measurements of batches: they add up in any grouping, and cross the wire unchanged."""

from __future__ import annotations

import pytest
import torch

from fedlens.core.measured import Measured, Total, total


def part(k: int) -> Measured:
    matrix = torch.zeros(70, 70, dtype=torch.int64)
    matrix[k, 3] = k
    return Measured({"n": torch.tensor(k), "matrix": matrix}, {"score": torch.arange(k).float()})


def same(one: Measured, other: Measured) -> bool:
    return all(
        left.keys() == right.keys()
        and all(
            torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
        )
        for left, right in ((one.sums, other.sums), (one.rows, other.rows))
    )


def test_the_grouping_does_not_show() -> None:
    a, b, c = part(2), part(0), part(5)
    assert same((a + b) + c, a + (b + c))
    assert same(total([a, b, c]), (a + b) + c)
    assert (a + b + c).rows["score"].tolist() == [0, 1, 0, 1, 2, 3, 4]


def test_adding_changes_no_part() -> None:
    a, b = part(2), part(3)
    total([a, b, a])
    assert same(a, part(2))
    assert same(b, part(3))


def test_a_name_that_only_one_batch_has_counts_as_zero_and_as_no_rows_in_the_other() -> None:
    both = Measured({"a": torch.tensor(1)}) + Measured({"b": torch.tensor(2)}, {"r": torch.ones(2)})
    assert {name: int(value) for name, value in both.sums.items()} == {"a": 1, "b": 2}
    assert both.rows["r"].tolist() == [1, 1]


def test_nothing_has_no_sum() -> None:
    with pytest.raises(ValueError, match="no measurements to add"):
        Total().result()


def test_a_matrix_of_few_values_is_sent_as_these_and_is_the_same_again() -> None:
    sparse, dense = part(5), Measured({"matrix": torch.ones(70, 70)})
    assert sparse.to_payload()["sparse"]["matrix"]["values"].tolist() == [5]
    assert not dense.to_payload()["sparse"]
    for one in (sparse, dense, part(0)):
        assert same(Measured.from_payload(one.to_payload()), one)


def test_a_negative_size_does_not_make_up_for_a_large_one() -> None:
    values = {"at": torch.tensor([0]), "values": torch.ones(1)}
    sparse = {"large": {**values, "shape": [10**10]}, "small": {**values, "shape": [-(10**10)]}}
    with pytest.raises(ValueError, match="negative size"):
        Measured.from_payload({"sums": {}, "sparse": sparse, "rows": {}}, most=1000)
