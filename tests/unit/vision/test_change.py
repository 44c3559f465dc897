"""What a change says of pixels, points and boxes, by hand."""

from __future__ import annotations

import pytest
import torch

from fedlens.vision.change import Change


def test_a_window_that_reaches_outside_reads_outside_there() -> None:
    change = Change.windows(torch.tensor([[-1.0, 2.0, 4.0, 4.0]]), (4, 4))
    rows, columns = change.sources()
    assert rows.tolist() == [[-1, 0, 1, 2]]
    assert columns.tolist() == [[2, 3, 4, 5]]
    assert change.boxes(torch.tensor([[0.0, 0.0, 3.0, 2.0]]), torch.tensor([0])).tolist() == [[-2, 1, 1, 3]]


def test_scaling_comes_before_flipping_and_both_axes_are_flipped_on_their_own() -> None:
    windows = torch.tensor([[0.0, 0.0, 2.0, 4.0]] * 4)
    left_right, up_down = torch.tensor([False, True, False, True]), torch.tensor([False, False, True, True])
    change = Change.windows(windows, (4, 4), left_right, up_down)
    rows, columns = change.sources()
    assert rows.tolist() == [[0, 0, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2
    assert columns.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]] * 2
    box, images = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.arange(4)
    assert change.boxes(box.expand(4, 4), images).tolist() == [
        [0, 0, 1, 2],
        [3, 0, 4, 2],
        [0, 2, 1, 4],
        [3, 2, 4, 4],
    ]


def test_the_pixel_that_is_read_is_the_one_whose_area_the_point_lies_in() -> None:
    draw = torch.Generator().manual_seed(0)
    windows = torch.rand(50, 4, generator=draw) * torch.tensor([6.0, 6, 10, 10]) + torch.tensor(
        [-2, -2, 0.5, 0.5]
    )
    flips = torch.rand(2, 50, generator=draw) < 0.5
    change = Change.windows(windows, (7, 5), *flips)
    rows, columns = change.sources()
    for k in range(50):
        # The corners of the pixels that are read, moved: the centre of pixel (i, j) lies between them.
        at = torch.full((5,), k)
        y = rows[k, 3].float().expand(5)
        corners = torch.stack([columns[k].float(), y, columns[k].float() + 1, y + 1], 1)
        left, top, right, bottom = change.boxes(corners, at).unbind(1)
        centres = torch.arange(5) + 0.5
        assert bool(((left <= centres + 1e-3) & (centres <= right + 1e-3)).all())
        assert bool(((top <= 3.5 + 1e-3) & (bottom >= 3.5 - 1e-3)).all())


def test_tensors_of_several_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have the shapes \[\(1,\), \(2,\)\]"):
        Change.windows(torch.ones(2, 4), (3, 3), torch.tensor([True]))


def test_a_change_moves_to_a_device_with_all_its_parts() -> None:
    moved = Change.flips(torch.tensor([True]), (3, 3)).to("meta")
    assert moved.mirrored is not None
    assert {moved.top.device.type, moved.mirrored.device.type} == {"meta"}
    assert moved.upended is None
