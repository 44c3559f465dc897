from __future__ import annotations

import io
import json
from typing import Any

import pytest

from fedlens.data.formats import coco_annotations
from fedlens.data.formats.coco_annotations import Batches, read_lists

NESTED = [{"id": at, "inner": [{"x": {}}, {"y": "} , {"}] * 3, "n": at / 7} for at in range(40)]


def flat(batches: Batches) -> list[Any]:
    return [entry for batch in batches for entry in batch]


def same(text: str) -> bool:
    """Whether the parts are what the standard library reads, to the type of each value."""
    return repr(read_lists(io.StringIO(text), {"a": flat, "b": flat})) == repr(json.loads(text))


@pytest.mark.parametrize("window", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    "content",
    [
        {},
        {"a": [], "b": [{}], "c": [1, {"a": [2]}]},
        {"info": {"a": [1, 2]}, "a": [{"x": float("nan")}, {"x": [1e300, 2**70, -0.0, True, None]}, "}", 12345]},
        {"a": NESTED, "rest": "text", "b": NESTED[:3]},
        {"a": [{"name": "\ud800"}] * 3 + [{"name": "ü\u2028"}] * 50},
        {"a": "no list", "b": 123456},
    ],
)  # fmt: skip
def test_lists_in_parts_are_those_of_the_standard_library(
    monkeypatch: pytest.MonkeyPatch, content: Any, window: int
) -> None:
    monkeypatch.setattr(coco_annotations, "_WINDOW", window)
    monkeypatch.setattr(coco_annotations, "_SMALLEST", 8)
    assert same(json.dumps(content))
    assert same(json.dumps(content, indent=3))
    assert same(json.dumps(content, ensure_ascii=True, separators=(",\r\n", "\t: ")))


def test_entries_that_are_read_one_by_one_are_gathered() -> None:
    text = json.dumps({"a": [{"name": "\ud800"}] * 1000 + [1] * 1000})
    assert read_lists(io.StringIO(text), {"a": lambda batches: [*map(len, batches)]}) == {"a": [2000]}


def test_the_last_value_of_a_key_counts() -> None:
    assert same('{"a": [1], "a": [2, 3], "b": [1], "b": 7}')


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", '{"a": [1}', '{"a": [1,]}', '{"a": [1 2]}', '{"a": [1]} 1', '{"a" [1]}', "{1: 2}", '{"a": 1,}',
     '{"a": [{"b": 01}]}', '{"a": [{"b": "\t"}]}', '{"a": tru}', '{"a": [{"b": 1}'],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the caller reads the file again, for the line and column
        read_lists(io.StringIO(text), {"a": flat})
