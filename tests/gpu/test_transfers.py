"""Copies of whole payloads between the processor and a GPU: their bits and layout, and that they do not wait."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.core import device_copies as transfers
from fedlens.core.device_copies import downloaded, uploaded
from fedlens.core.schema import tensors_in

CUDA = torch.device("cuda")


def payload() -> dict[str, Any]:
    """Tensors of many dtypes and layouts, among other values."""
    made = torch.Generator().manual_seed(0)
    image = torch.rand(2, 3, 5, 4, generator=made).to(memory_format=torch.channels_last)
    twice = torch.rand(7, generator=made, requires_grad=True)
    return {
        "model": {"image": image, "half": torch.rand(3, generator=made).bfloat16(), "none": torch.ones(0, 4)},
        "more": (twice, [twice, torch.tensor(3), torch.tensor([True, False])], 2.5, "word", None),
        "part": torch.arange(12.0).view(3, 4)[:, 1:3],
        "wide": torch.ones(3, 1).expand(3, 2),
        "complex": torch.rand(2, dtype=torch.complex128, generator=made).conj(),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two payloads have the same form, and tensors of the same bits and dtypes."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_payload_survives_both_directions() -> None:
    value = payload()
    there = uploaded(value, CUDA)
    assert {tensor.device.type for tensor in tensors_in(there)} == {"cuda"}
    assert there["model"]["image"].stride() == value["model"]["image"].stride()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors_in(there))
    assert not there["more"][0].requires_grad
    assert there["more"][0] is there["more"][1][0]  # copied once
    back = downloaded(there)
    assert same(value, back)
    assert back["model"]["image"].stride() == value["model"]["image"].stride()
    assert {tensor.untyped_storage().nbytes() for tensor in tensors_in(back["model"])} == {480, 6, 0}


def test_what_is_there_already_is_not_copied() -> None:
    there, here = torch.ones(3, device=CUDA), torch.ones(3)
    assert uploaded({"w": there}, CUDA)["w"] is there
    assert downloaded({"w": here})["w"] is here
    mixed = uploaded([there, here], CUDA)
    assert mixed[0] is there
    assert torch.equal(mixed[1], there)


def test_an_upload_may_be_changed_and_leaves_its_source_alone() -> None:
    here = torch.ones(3)
    uploaded(here, CUDA).add_(1)
    assert here.tolist() == [1, 1, 1]


@pytest.mark.parametrize("leaves", [1, 40])
def test_one_copy_a_direction_and_one_wait(simgpu: Any, leaves: int) -> None:
    value = {str(at): torch.rand(at + 1) for at in range(leaves)}
    with simgpu.counted() as counts:
        there = uploaded(value, CUDA)
    assert (counts["uploads"], counts["waits"]) == (1, 0)
    with simgpu.counted() as counts:
        downloaded(there)
    assert (counts["downloads"], counts["waits"]) == (1, 1)


def test_what_needs_more_than_a_block_crosses_in_several(
    monkeypatch: pytest.MonkeyPatch, simgpu: ModuleType
) -> None:
    monkeypatch.setattr(transfers, "_BLOCK", 256)
    value = [torch.full((16,), float(k)) for k in range(9)] + [torch.ones(1000)]
    with simgpu.counted() as counts:
        there = uploaded(value, CUDA)
        back = downloaded(there)
    assert same(back, value)
    assert counts["uploads"] == counts["downloads"] == counts["waits"] == 4
