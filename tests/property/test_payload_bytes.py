"""Payloads as bytes of a safetensors file: all of them come back, and no bytes do harm."""

from __future__ import annotations

import json
import re
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.base.errors import DecodingError
from fedlens.core import tensorfile
from fedlens.core.payload import decode, encode, pack, unpack
from fedlens.core.tensorfile import Bounds, parse
from tests.property.test_wire import PAYLOADS, same
from tests.property.test_wire import tensors as any_tensor

AS_BYTES = [
    torch.complex128,
    torch.complex32,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
]


def has_array(value: Any) -> bool:
    """Whether a payload has a numpy array in it, which travels in shared memory only."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(has_array, value))
    return type(value).__module__ == "numpy"


def as_bytes(payload: dict[str, Any]) -> bytes:
    tensors, metadata = pack(payload)
    with tempfile.TemporaryDirectory() as folder:
        tensorfile.write(Path(folder) / "a", tensors, metadata, sync=False)
        return (Path(folder) / "a").read_bytes()


def there_and_back(payload: dict[str, Any]) -> dict[str, Any]:
    return unpack(*parse(as_bytes(payload)))


EXAMPLE = as_bytes(
    {
        "state": {"w": torch.randn(3, 2), "n": torch.tensor(5), "none": torch.empty(0, 4), "yes": torch.tensor([True])},
        "wide": torch.ones(2, dtype=torch.complex128),
        "plain": [1, 2.5, float("nan"), None, "text", b"bytes", (True, {})],
    }
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(payload=st.dictionaries(st.text(max_size=4), PAYLOADS.filter(lambda p: not has_array(p)), max_size=4))
def test_every_payload_comes_back(payload: dict[str, Any]) -> None:
    assert same(there_and_back(payload), payload)


@settings(max_examples=60, deadline=None)
@given(value=any_tensor())
def test_every_tensor_comes_back_in_memory_of_its_own(value: torch.Tensor) -> None:
    first = there_and_back({"a": value, "b": [value]})
    assert same(first, {"a": value, "b": [value]})
    assert first["a"].data_ptr() == first["b"][0].data_ptr()
    assert first["a"].is_contiguous()


@pytest.mark.parametrize("dtype", [*sorted(tensorfile.DTYPES, key=str), *AS_BYTES], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3,), (2, 3)], ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.ones((*shape, dtype.itemsize), dtype=torch.uint8)
    value = raw.reshape(-1).view(dtype).reshape(shape)
    back = there_and_back({"w": value})["w"]
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw.reshape(-1))


def decoded(data: bytes) -> None:
    """Decodes bytes of anybody: a payload no larger than they are, or one sentence."""
    sentence = ""
    try:
        tensors, metadata = parse(data)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= len(data)
        unpack(tensors, metadata)
    except DecodingError as error:
        sentence = str(error)
    assert re.fullmatch("|(it has|not a whole safetensors file:|not a payload:) .* \\(.*\\); .*\\.", sentence)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_a_sentence_or_a_payload(data: st.DataObject) -> None:
    header = 8 + int.from_bytes(EXAMPLE[:8], "little")
    end = data.draw(st.sampled_from([header, len(EXAMPLE)]))  # damage to the header says more
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, min(start + 40, end)))
    new = data.draw(
        st.binary(max_size=40) | st.sampled_from([b"", b"9", b"[", b"-", b"null", b"true", b"1e9", b"{}"])
    )
    decoded(EXAMPLE[:start] + new + EXAMPLE[stop:])


def test_bytes_that_are_cut_anywhere_are_a_sentence() -> None:
    for length in range(len(EXAMPLE)):
        with pytest.raises(DecodingError):
            parse(EXAMPLE[:length])


def test_a_flipped_bit_of_the_header_is_a_sentence_or_a_payload() -> None:
    for place in range(8 + int.from_bytes(EXAMPLE[:8], "little")):
        for bit in (place % 8, (place + 3) % 8):
            decoded(EXAMPLE[:place] + bytes([EXAMPLE[place] ^ 1 << bit]) + EXAMPLE[place + 1 :])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)
MARKED = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("map", "tuple", "tensor", "float", "bytes", "dtype", "shape", "data_offsets"), JSON
    ),
)


@settings(max_examples=150, deadline=None)
@given(node=JSON | MARKED | st.dictionaries(st.text(max_size=3), MARKED, max_size=3))
def test_any_json_is_a_structure_or_a_sentence(node: Any) -> None:
    structure, tensors = encode({"w": torch.ones(2), "wide": torch.ones(1, dtype=torch.complex128)})
    with suppress(DecodingError):
        decode({"map": {"a": node, "b": structure}}, tensors)
    text = json.dumps({"w": node, **node} if isinstance(node, dict) else {"w": node}).encode()
    decoded(len(text).to_bytes(8, "little") + text + bytes(8))


def peak(data: bytes, bounds: Bounds) -> int:
    """The most bytes that are allocated while `data` is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(DecodingError):
            parse(data, bounds)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_refused_was_never_allocated() -> None:
    empty = [b'{"w":[' + b"[]," * 300_000 + b"0]}", b'{"w":"' + b"," * 300_000 + b'"}']
    for header in empty:  # 900 kB of text would be 20 MB of lists
        assert peak(len(header).to_bytes(8, "little") + header, Bounds(entries=1000)) < 3 * len(header)
    tensors = b'{"v":{"dtype":"U8","shape":[3000000],"data_offsets":[0,3000000]},"w":%s}'
    for entry in (b'{"dtype":"U8","shape":[5],"data_offsets":[3000000,3000004]}', b"{}", b'{"dtype":"F99"}'):
        header = tensors % entry
        data = len(header).to_bytes(8, "little") + header + bytes(3_000_004)
        assert peak(data, tensorfile.FILE) < 100_000
