"""The codec of shared memory: whatever goes in comes out, equal to the bit, and looks at the region."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlens.core.protocol import Failure, Id, Reply
from fedlens.core.schema import NumberField, Schema, TreeField
from fedlens.core.tree import Leaf
from fedlens.engines.shared_memory import Packer, Pool, Region, unpack

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype and bits, 0-dimensional, empty, transposed, strided, and looking at a part of something larger."""
    dtype, shape = draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    shape = tuple(2 * extent for extent in shape) if (strided := draw(st.booleans())) else shape
    raw = draw(st.randoms(use_true_random=False)).randbytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    flat = torch.tensor(list(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    value = flat.reshape(shape)
    if strided:
        value = value[tuple(slice(None, None, 2) for _ in shape)]
    return value.transpose(0, -1) if value.ndim > 1 and draw(st.booleans()) else value


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=30),
    st.sampled_from([4095, 4096, 4097, 70_000]).map(lambda n: bytes(i % 251 for i in range(n))),
    st.sampled_from(["<f8", "<f4", ">i4", "?", "<u2", "<i8"]).flatmap(
        lambda d: st.sampled_from([0, 3, 600, 5000]).map(lambda n: np.arange(n).astype(d).reshape(-1, 1))
    ),
)
PAYLOADS = st.recursive(
    st.one_of(PLAIN, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    max_leaves=12,
)


def bits(value: Tensor) -> bytes:
    raw = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape and bits."""
    if isinstance(a, Tensor):
        like = isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return like and bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b) and a.shape == b.shape
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def there_and_back(payload: Any, code: bool = False) -> tuple[Any, Region | None, Packer]:
    packer = Packer(payload, code=code)
    region = Region(packer.size) if packer.size else None
    view = region.view() if region else memoryview(b"")
    packer.write(view)
    return unpack(packer.envelope, view), region, packer


@given(PAYLOADS)
@settings(max_examples=250)
def test_what_goes_in_comes_out(payload: Any) -> None:
    back, region, _ = there_and_back(payload)
    assert same(payload, back)
    if region:
        region.close()


@given(tensors(), tensors())
def test_the_same_tensor_twice_travels_once_and_comes_back_as_one_place(value: Tensor, other: Tensor) -> None:
    single = Packer({"a": value, "c": other})
    back, region, packer = there_and_back({"a": value, "b": [value], "c": other})
    assert packer.size == single.size
    assert same([value, value, other], [back["a"], back["b"][0], back["c"]])
    if value.numel():
        assert back["a"].data_ptr() == back["b"][0].data_ptr()
    if region:
        region.close()


@given(st.lists(tensors(), min_size=1, max_size=6))
def test_no_two_tensors_share_a_byte(values: list[Tensor]) -> None:
    back, region, packer = there_and_back(values)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in back if t.numel())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert packer.size >= sum(end - start for start, end in spans)
    if region:
        region.close()


@given(PAYLOADS)
@settings(max_examples=50)
def test_packing_leaves_the_payload_as_it_was(payload: Any) -> None:
    again, first, _ = there_and_back(payload)
    _, second, _ = there_and_back(payload)
    assert same(payload, again)
    for region in (first, second):
        if region:
            region.close()


def test_nothing_of_the_large_travels_in_the_envelope() -> None:
    heavy = {"t": torch.zeros(100_000), "a": np.zeros(100_000), "b": bytes(100_000)}
    packer = Packer(heavy)
    assert packer.size >= 100_000 * (4 + 8 + 1)
    assert len(packer.envelope) < 1000


def test_a_tensor_that_came_looks_at_the_region_until_the_last_is_gone() -> None:
    packer = Packer({"x": torch.arange(8.0), "y": torch.arange(3)})
    region, freed = Region(packer.size), []
    packer.write(region.view())
    got = unpack(packer.envelope, region.view(freed=lambda: freed.append(True)))
    packer.write(region.view())
    Packer([torch.full((8,), 5.0)]).write(region.view())
    assert got["x"].tolist() == [5.0] * 8  # the same memory, seen from here
    y = got.pop("y")
    del got
    assert freed == []
    del y
    assert freed == [True]
    region.close()


def test_the_pool_gives_the_smallest_that_fits() -> None:
    pool = Pool()
    small, large = pool.take(100), pool.take(1_000_000)
    pool.give(large)
    pool.give(small)
    assert pool.take(10) is small
    assert pool.take(10) is large
    pool.close()
    small.close()
    large.close()


def test_answers_and_schemas_travel() -> None:
    leaves = {"w": ((2, 2), torch.float32), "n": ((), torch.int64)}
    schema = Schema({"update": TreeField(leaves), "weight": NumberField(above=0, most=7.0)})
    answers = [
        Reply(Id(1, 2, 3), 4, {"update": {"w": torch.eye(2), "n": torch.tensor(5)}}, {"loss": 0.5}, None, 16),
        Failure(Id(1, 2, 4), "@test", "it was too late"),
    ]
    (got_schema, got), region, _ = there_and_back((schema, answers))
    assert got_schema == schema
    assert (got[0].id, got[0].client, got[0].metrics, got[0].nbytes) == (Id(1, 2, 3), 4, {"loss": 0.5}, 16)
    assert isinstance(got[0].id, Id)
    assert same(dict(answers[0].payload["update"]), got[0].payload["update"])
    assert got[1] == answers[1]
    assert (
        Leaf("weight", (1,), torch.float32, True)
        == there_and_back(Leaf("weight", (1,), torch.float32, True))[0]
    )
    assert region is not None
    region.close()


def test_code_of_a_script_travels_with_the_tensors_it_closes_over() -> None:
    scale = torch.arange(5.0)

    def op(x: Tensor) -> Tensor:
        return x * scale

    back, region, packer = there_and_back({"op": op}, code=True)
    assert torch.equal(back["op"](torch.full((5,), 2.0)), 2 * scale)
    assert packer.size >= 20
    assert region is not None
    region.close()


def test_a_module_in_a_program_keeps_its_parameters_parameters() -> None:
    """An operation may hold a module of its own: a frozen extractor, a teacher, a head."""
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    back, region, _ = there_and_back({"teacher": module}, code=True)
    assert all(isinstance(p, nn.Parameter) for p in back["teacher"].parameters())
    assert [p.requires_grad for p in back["teacher"].parameters()] == [True, False]
    assert same(dict(module.state_dict()), dict(back["teacher"].state_dict()))
    assert region is not None
    region.close()
