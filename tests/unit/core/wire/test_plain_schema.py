"""Schemas that travel to a site as plain values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from fedlens.base.errors import DecodingError
from fedlens.core.payload import decode, encode
from fedlens.core.schema import MEASUREMENTS, Bound, NumberField, Schema, TensorField, TreeField
from fedlens.core.wire.plain_schema import from_plain, most_bytes, to_plain

TREE = TreeField({"w": ((3, 4), torch.float32), "n": ((), torch.int64), "f": ((2,), torch.float8_e4m3fn)})
FULL = Schema(
    {
        "update": TREE,
        "x": TensorField((-1, 2), torch.bfloat16, 0, 1, most=800),
        "weight": NumberField(0, 100),
    },
    typical={"update": 2.5},
    metrics={"sent_share": Bound(0, 1), "kept": Bound(0, 9, integer=True)},
    letter=Schema({"y": TensorField((2,), torch.uint8)}),
    aligned=("x",),
)


@pytest.mark.parametrize("schema", [Schema(), MEASUREMENTS, FULL])
def test_a_schema_comes_back_over_json(schema: Schema) -> None:
    text = json.dumps(encode({"expect": to_plain(schema)})[0], allow_nan=False)
    assert from_plain(decode(json.loads(text), {})["expect"]) == schema


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("fields", [1]), ("fields", {"x": {"tree": {"w": [[3], "float33"]}}}),
        ("fields", {"x": {"tree": {"w": [[-1], "int8"]}}}),
        ("fields", {"x": {"tensor": [[-2], "int8", 0, 1, 2]}}), ("fields", {"x": {"number": [math.nan, 1]}}),
        ("fields", {"x": {"number": [0, 1], "tree": {}}}), ("fields", {"x": {"tensor": [[True], "int8", 0, 1, 2]}}),
        ("fields", {"x": {"tensor": [[1] * 65, "int8", 0, 1, 2]}}), ("typical", {"x": "2"}), ("finite", 1),
        ("metrics", {"test_accuracy": [0, 1, False]}), ("metrics", {"x": [0, 1, 1]}), ("letter", {}),
        ("aligned", ["z"]),
        ("aligned", "update"), ("letter", to_plain(Schema(letter=Schema()))), ("more", 1),
    ],
)  # fmt: skip
def test_anything_else_is_refused(place: str, value: Any) -> None:
    with pytest.raises(DecodingError, match="not a schema"):
        from_plain({**to_plain(FULL), place: value})


def test_the_largest_body_is_known_where_the_shapes_are() -> None:
    tree = 3 * 4 * 4 + 8 + 2
    assert most_bytes(Schema({"update": TREE, "weight": NumberField()}), 2**40) == tree + 8 + 2**20
    assert most_bytes(Schema({"x": TensorField((-1, 2), torch.float32)}), 2**40) == 2**40
    assert most_bytes(Schema({"x": TensorField((-1, 2), torch.float32, most=800)}), 2**40) == 800 + 2**20
    assert most_bytes(Schema({"update": TREE}), 100) == 100
    assert most_bytes(FULL, 2**40) == 2**40  # letters have their own schema
    assert most_bytes(Schema(), 2**40) == 2**40
