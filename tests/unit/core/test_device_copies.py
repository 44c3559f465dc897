"""One block of memory for the tensors of a payload; the copies to and from a GPU are in tests/gpu."""

from __future__ import annotations

import torch

from fedlens.core.device_copies import block_size, downloaded, views


def test_the_parts_of_a_block_are_apart_and_aligned() -> None:
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    forms = [torch.ones((), dtype=torch.bool), image, torch.ones(0, 2), torch.ones(4, 6)[:, 1:3]]
    block = torch.zeros(block_size(forms), dtype=torch.uint8)
    parts = views(block, forms)
    assert [(p.dtype, p.shape) for p in parts] == [(form.dtype, form.shape) for form in forms]
    assert [p.stride() for p in parts] == [(), image.stride(), (2, 1), (2, 1)]
    assert [p.storage_offset() * p.element_size() for p in parts] == [0, 64, 576, 576]
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [part.unique().tolist() for part in parts] == [[False], [1], [], [3]]


def test_nothing_is_copied_on_the_processor() -> None:
    here = torch.ones(3)
    assert downloaded({"w": [here]})["w"][0] is here
