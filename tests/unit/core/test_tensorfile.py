"""Safetensors bytes of strangers: what is refused, and what the sentence says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.base.errors import DecodingError, RunFailed
from fedlens.core import payload, tensorfile
from fedlens.core.tensorfile import Bounds, parse, read, read_metadata


def data_of(header: Any, body: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it has 0 bytes, and the length of its header alone takes 8"),
    "a cut header": (data_of({})[:-1], "its header is cut after 1 of 2 bytes"),
    "a long header": ((2**40).to_bytes(8, "little"), "a header of 1,099,511,627,776 bytes, and at most 100,000,000"),
    "no JSON": (data_of(b"{x}"), "its header is not JSON"),
    "no object": (data_of(b"[1]"), "its header is not a JSON object"),
    "deep": (data_of(b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"), "nested more than 200 levels deep"),
    "deeper": (data_of(b'{"a":' + b"[" * 100_000), "nested more than 200 levels deep"),
    "other metadata": (data_of({"__metadata__": {"a": 1}}), "its metadata are not texts by name"),
    "no entry": (data_of({"w": 1}), "tensor 'w' needs exactly dtype, shape and data_offsets"),
    "more in an entry": (data_of({"w": {**entry(), "x": 1}}, 8), "tensor 'w' needs exactly"),
    "dtype": (data_of({"w": entry("F99")}, 8), "tensor 'w' has the unknown dtype \"F99\""),
    "no dtype": (data_of({"w": entry([])}, 8), "tensor 'w' has the unknown dtype []"),
    "shape": (data_of({"w": entry(shape=[3])}, 8), "tensor 'w' has 8 bytes, not those of F32 [3]"),
    "negative": (data_of({"w": entry(shape=[-1, -2])}, 8), "not those of F32 [-1, -2]"),
    "truth": (data_of({"w": entry("U8", [True], [0, 1])}, 1), "not those of U8 [true]"),
    "no shape": (data_of({"w": entry(shape=2)}, 8), "not those of F32 2"),
    "huge": (data_of({"w": entry(shape=[2**40, 2**40])}, 8), "not those of F32 [1099511627776, 1099511627776]"),
    "huge and empty": (data_of({"w": entry(shape=[0, 2**40, 2**40], offsets=[0, 0])}), "has 0 bytes, not those of"),
    "dimensions": (data_of({"w": entry("U8", [1] * 65, [0, 1])}, 1), "has 1 bytes, not those of U8"),
    "offsets": (data_of({"w": entry(offsets=[0, 8.0])}, 8), "tensor 'w' needs two positions as data_offsets"),
    "negative offsets": (data_of({"w": entry(offsets=[-8, 0])}, 8), "needs two positions"),
    "a gap": (data_of({"v": entry(), "w": entry(offsets=[9, 17])}, 17), "starts at byte 9, and the one before ends at"),
    "overlap": (data_of({"v": entry(), "w": entry(offsets=[4, 12])}, 12), "tensor 'w' starts at byte 4, and the one"),
    "aliases": (data_of({"v": entry(), "w": entry()}, 8), "tensor 'w' starts at byte 0, and the one before ends at 8"),
    "trailing bytes": (data_of({"w": entry()}, 9), "its tensors have 8 bytes, and 9 follow the header"),
    "missing bytes": (data_of({"w": entry()}, 7), "its tensors have 8 bytes, and 7 follow the header"),
    "a long name": (data_of({"\x1b" * 900: 1}), "tensor '\\\\x1b"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bytes_of_strangers_are_refused_in_one_sentence(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(DecodingError) as told:
        parse(data, where="message of site 7")
    assert words in told.value.what
    assert (told.value.where, "\n" in str(told.value), len(str(told.value)) < 1200) == (
        "message of site 7",
        False,
        True,
    )
    assert told.value.hint in ("copy or send it again", "split what it holds")


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (Bounds(size=76), "it has 77 bytes, and at most 76 are accepted (message); split what it holds."),
        (Bounds(header=60), "it has a header of 61 bytes, and at most 60 are accepted"),
        (Bounds(entries=6), "it has up to 7 values in the header, and at most 6 are accepted"),
    ],
)
def test_a_bound_is_the_last_number_that_is_accepted(bounds: Bounds, words: str) -> None:
    data = data_of({"w": entry()}, 8)
    with pytest.raises(DecodingError) as told:
        parse(data, bounds)
    assert words in str(told.value)
    assert parse(data, Bounds(size=77, header=61, entries=7))[0]["w"].tolist() == [0.0, 0.0]


def test_a_file_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    os.truncate(path, 2**41)  # no bytes on the disk
    with pytest.raises(
        DecodingError, match="2,199,023,255,552 bytes, and at most 1,099,511,627,776 are accepted"
    ):
        read(path)
    with pytest.raises(DecodingError, match="not a JSON object"):
        read_metadata(path)


@pytest.mark.parametrize(
    ("node", "words", "place"),
    [
        ([], "it is a list, not a mapping", "/"),
        ({"map": {"a/b": {"set": []}}}, "an object has the keys 'set'", "/a~1b"),
        ({"map": {}, "more": 1}, "an object has the keys 'map', 'more'", "/"),
        ({"map": {"a": [{"float": "12"}]}}, "an object has the keys 'float'", "/a/0"),
        ({"map": {"a": {"bytes": "?"}}}, "its bytes are not base64", "/a"),
        ({"map": {"a": {"tensor": "x"}}}, "there is no tensor 'x'", "/a"),
        ({"map": {"a": {"tensor": "w", "dtype": "load", "shape": []}}}, "the unknown dtype 'load'", "/a"),
        ({"map": {"a": {"tensor": "w", "dtype": "float32", "shape": [1]}}}, "the unknown dtype 'float32'", "/a"),
        ({"map": {"a": {"tensor": "w", "dtype": "complex128", "shape": [2]}}}, "a tensor of 16 bytes has not", "/a"),
        ({"map": {"a": {"tensor": "f", "dtype": "complex128", "shape": [1]}}}, "a tensor of 64 bytes has not", "/a"),
    ],
)  # fmt: skip
def test_a_forged_structure_is_refused_with_its_place(node: Any, words: str, place: str) -> None:
    with pytest.raises(DecodingError) as told:
        payload.decode(node, {"w": torch.ones(16, dtype=torch.uint8), "f": torch.ones(16)})
    assert (words in told.value.what, told.value.where) == (True, place)


def test_a_deep_structure_is_refused() -> None:
    node: Any = 1
    for _ in range(5000):
        node = [node]
    with pytest.raises(DecodingError, match="nested more than 200 levels deep"):
        payload.decode({"map": {"a": node}}, {})


def test_metadata_without_a_structure_are_refused() -> None:
    for metadata, words in (
        ({}, "no structure in its metadata"),
        ({"state": "{"}, "its structure is not JSON"),
    ):
        with pytest.raises(DecodingError, match=words):
            payload.unpack({}, metadata)


@pytest.mark.parametrize(
    ("value", "words"),
    [(10**4301, "an integer of more than 4200 digits"), (torch.empty(2, dtype=torch.uint4), "uint4")],
    ids=["integer", "dtype"],
)
def test_what_no_reader_would_accept_is_not_written(value: Any, words: str) -> None:
    with pytest.raises(RunFailed, match=words):
        payload.encode({"a": value})


def test_the_deepest_payload_that_is_written_is_read(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(90):
        deep = {"a": deep}
    tensors, metadata = payload.pack({"a": deep})
    tensorfile.write(tmp_path / "a", tensors, metadata)
    assert payload.unpack(*parse((tmp_path / "a").read_bytes())) == {"a": deep}
    with pytest.raises(RunFailed, match="more than 90 levels"):
        payload.encode({"a": {"a": deep}})
