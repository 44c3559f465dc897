"""Replies that must be refused, and the sentence that says why."""

import math

import pytest
import torch
from torch import nn

from fedlens.base.errors import HookError
from fedlens.core.schema import (
    METRICS,
    Bound,
    NumberField,
    Schema,
    TensorField,
    TreeField,
    finite_fault,
    nbytes,
    tensors_in,
)
from fedlens.core.tree import spec_of

TREE = TreeField({"w": ((2,), torch.float32), "n": ((), torch.int64)})
GOOD = {"w": torch.ones(2), "n": torch.tensor(3)}
SCHEMA = Schema({"update": TREE, "weight": NumberField(above=0, most=10)})


def test_a_good_reply_has_no_fault() -> None:
    assert SCHEMA.fault({"update": GOOD, "weight": 10}) is None
    assert SCHEMA.fault({"weight": 1e-9, "update": GOOD}) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"update": {**GOOD, "w": torch.tensor([1.0, math.nan])}}, "update holds NaN or Inf"),
        ({"update": {**GOOD, "w": torch.tensor([1.0, -math.inf])}}, "update holds NaN or Inf"),
        ({"update": {**GOOD, "w": torch.ones(1)}}, "update.w has shape (1,) where (2,) is expected"),
        ({"update": {**GOOD, "w": torch.ones(2, 1)}}, "update.w has shape (2, 1) where (2,) is expected"),
        (
            {"update": {**GOOD, "w": torch.ones(2, dtype=torch.float64)}},
            "update.w is torch.float64 where torch.float32 is expected",
        ),
        ({"update": {**GOOD, "w": [1.0, 1.0]}}, "update.w is list, not a tensor"),
        ({"update": {"w": torch.ones(2)}}, "update lacks n"),
        ({"update": {**GOOD, "x": torch.ones(1)}}, "update has an extra x"),
        ({"update": torch.ones(2)}, "update is Tensor, not a tree"),
        ({"weight": 0}, "weight is 0, outside (0, 10]"),
        ({"weight": -1.0}, "weight is -1, outside (0, 10]"),
        ({"weight": 10.5}, "weight is 10.5, outside (0, 10]"),
        ({"weight": math.nan}, "weight is nan"),
        ({"weight": math.inf}, "weight is inf"),
        ({"weight": True}, "weight is bool, not a number"),
        ({"weight": "3"}, "weight is str, not a number"),
        ({"weight": torch.tensor(3.0)}, "weight is Tensor, not a number"),
        (
            {"more": 1},
            'there is an extra more, which `expect` does not announce: add "more": NumberField() to it '
            '(from fedlens.rules import NumberField), and "more": "mean" to `fields` of a client rule for its mean',
        ),
        (
            {"more": torch.tensor(1.0)},
            "there is an extra more, which `expect` does not announce: "
            'add "more": TensorField((), torch.float32) to it (from fedlens.rules import TensorField), and "more": '
            '"mean" to `fields` of a client rule for its mean',
        ),
    ],
)
def test_a_bad_reply_is_refused_with_the_reason(change, fault: str) -> None:
    assert SCHEMA.fault({"update": GOOD, "weight": 3.0, **change}) == fault


def test_what_is_missing_and_what_is_no_payload_at_all() -> None:
    assert SCHEMA.fault({"update": GOOD}) == "weight is missing"
    assert SCHEMA.fault([GOOD]) == "the payload is list, not a mapping"
    assert SCHEMA.fault(None) == "the payload is NoneType, not a mapping"


def test_a_field_may_be_like_a_model() -> None:
    module = nn.BatchNorm1d(3)
    field = TreeField.like(spec_of(module))
    assert field.fault("model", module.state_dict()) is None
    assert field.fault("model", nn.BatchNorm1d(4).state_dict()) is not None


def test_a_tensor_field() -> None:
    field = TensorField((3,), torch.float32)
    assert field.fault("g", torch.ones(3)) is None
    assert field.fault("g", torch.ones(1)) == "g has shape (1,) where (3,) is expected"
    assert field.fault("g", torch.full((3,), math.nan)) == "g holds NaN or Inf"
    assert (
        field.fault("g", torch.ones(3, dtype=torch.int64))
        == "g is torch.int64 where torch.float32 is expected"
    )


def test_without_fields_anything_finite_is_good() -> None:
    assert Schema().fault({"any": [torch.ones(2), {"deep": (torch.ones(1), "text", None)}], "n": 1}) is None
    assert Schema().fault({"any": [{"deep": (torch.tensor(math.nan),)}]}) == "any holds NaN or Inf"
    assert finite_fault({"a": 1, "b": torch.tensor([math.inf])}) == "b holds NaN or Inf"


def test_tensors_and_bytes_are_found_at_any_depth() -> None:
    a, b = torch.ones(2, 3), torch.ones(4, dtype=torch.uint8)
    payload = {"x": a, "y": [b, {"z": (a, b"12345")}], "n": 1, "f": 2.0, "t": "word", "none": None}
    assert [t is u for t, u in zip(tensors_in(payload), [a, b, a], strict=True)] == [True] * 3
    assert nbytes(payload) == 24 + 4 + 24 + 5 + 8 + 8


def test_a_tensor_has_bounds_where_they_are_given() -> None:
    field = TensorField((3,), torch.float64, low=0, high=5)
    counts = torch.tensor([0.0, 2.5, 5.0], dtype=torch.float64)
    assert field.fault("counts", counts) is None
    assert field.fault("counts", counts - 1) == "counts holds -1, outside [0, 5]"
    assert field.fault("counts", counts + 1) == "counts holds 6, outside [0, 5]"
    assert field.fault("counts", counts * math.nan) == "counts holds NaN or Inf"
    assert TensorField((3,), torch.float64).fault("counts", counts - 100) is None
    assert (
        TensorField((), torch.float64, high=1).fault("x", torch.tensor(2.0).double())
        == "x holds 2, outside [-inf, 1]"
    )


SHARE = Schema(metrics={"share": Bound(0, 1), "steps": Bound(1, 5, integer=True)})


@pytest.mark.parametrize(
    ("metrics", "fault"),
    [
        ({}, None),
        ({"loss": -3.5, "examples": 4.0, "batches": 0, "share": 1.0, "steps": 5.0}, None),
        ({"share": 1.01}, "its metric 'share' is 1.01, outside [0, 1]"),
        ({"share": -0.0}, None),
        ({"share": math.nan}, "its metric 'share' holds NaN or Inf"),
        ({"loss": math.inf}, "its metric 'loss' holds NaN or Inf"),
        ({"steps": 2.5}, "its metric 'steps' is 2.5, not a whole number"),
        ({"steps": 0.0}, "its metric 'steps' is 0, outside [1, 5]"),
        ({"examples": 0.5}, "its metric 'examples' is 0.5, not a whole number"),
        ({"batches": -1.0}, "its metric 'batches' is -1, outside [0, 9.0072e+15]"),
        ({"examples": 1e300}, "its metric 'examples' is 1e+300, outside [0, 9.0072e+15]"),
        ({"loss": 1.0, "other": 1.0}, "its metric 'other' is not declared: add it to `metrics` of the ask's"),
    ],
)
def test_metrics_are_declared_and_within_their_bounds(metrics: dict[str, float], fault: str | None) -> None:
    found = SHARE.metric_fault(metrics)
    assert (found is None) is (fault is None)
    assert fault is None or (found or "").startswith(fault)
    columns = {name: [METRICS["batches"].least + 1, value] for name, value in metrics.items()}
    assert SHARE.admits(columns) is (fault is None)
    assert SHARE.admits({name: values[::-1] for name, values in columns.items()}) is (fault is None)


def test_bounds_of_an_ask_come_before_those_of_every_operation() -> None:
    assert Schema(metrics={"loss": Bound(0, 10)}).metric_fault({"loss": 11.0}) is not None


@pytest.mark.parametrize(
    "name", ["test_accuracy", "validation_loss", "train_loss", "clients_x", "round", "seconds"]
)
def test_a_name_that_the_run_computes_cannot_be_declared(name: str) -> None:
    with pytest.raises(
        HookError, match=f"declares the metric '{name}', a name of what the run itself computes"
    ):
        Schema(metrics={name: Bound()})
