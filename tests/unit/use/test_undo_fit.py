"""Masks and boxes of a model's input in the pixels of the image file: the inverse of how files are fitted."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from fedlens.data.decoding import Fit, ImageForm, fitted, placement
from fedlens.use.annotation_files import boxes_of_file, mask_of_file
from fedlens.vision.mask_colors import FIXED, mask_colors

FITS = get_args(Fit)
SIZES = [
    ((61, 40), (24, 32)),
    ((40, 61), (32, 24)),
    ((9, 7), (24, 32)),
    ((32, 24), (24, 32)),
    ((200, 11), (16, 16)),
]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("file", "model"), SIZES)
def test_each_pixel_of_the_file_takes_the_class_at_the_place_of_its_centre(
    file: tuple[int, int], model: tuple[int, int], fit: Fit
) -> None:
    (width, height), (h, w) = file, model
    mask = np.arange(h * w).reshape(h, w) % 250
    across, down, left, top = placement(width, height, w, h, fit)
    found = mask_of_file(mask.astype(np.uint8), width, height, fit)
    assert found.shape == (height, width)
    for y in range(height):
        for x in range(width):
            at_x, at_y = (x + 0.5) * across + left, (y + 0.5) * down + top
            inside = 0 <= at_x < w and 0 <= at_y < h
            assert found[y, x] == (mask[int(at_y), int(at_x)] if inside else 255), (x, y)


@pytest.mark.parametrize("fit", ["pad", "stretch"])
def test_a_mask_that_was_made_larger_comes_back_as_it_was(fit: Fit) -> None:
    mask = np.random.default_rng(0).integers(0, 5, (12, 16), np.uint8)
    model = np.asarray(fitted(Image.fromarray(mask), 36, 64, fit, mask=True))
    assert np.array_equal(mask_of_file(model, 16, 12, fit), mask)


def test_what_the_crop_cut_off_has_no_class() -> None:
    mask = mask_of_file(np.ones((10, 10), np.uint8), 30, 10, "crop")
    assert (mask[:, :10] == 255).all()
    assert (mask[:, 10:20] == 1).all()
    assert (mask[:, 20:] == 255).all()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("file", "model"), SIZES)
def test_boxes_come_back_to_where_the_reader_took_them_from(
    file: tuple[int, int], model: tuple[int, int], fit: Fit
) -> None:
    (width, height), (h, w) = file, model
    across, down, left, top = placement(width, height, w, h, fit)
    own = np.array([[0.25 * width, 0.3 * height, 0.75 * width, 0.9 * height]])
    placed = own * np.array([across, down] * 2) + np.array([left, top] * 2)
    assert boxes_of_file(placed, width, height, w, h, fit) == pytest.approx(own)


def test_boxes_are_cut_to_the_file() -> None:
    found = boxes_of_file(np.array([[-5.0, 0, 60, 50], [0, 0, 50, 10]]), 200, 100, 50, 50, "pad")
    assert found.tolist() == [[0, 0, 200, 100], [0, 0, 200, 0]]


@pytest.mark.parametrize(("upright", "expected"), [(True, (4, 6)), (False, (6, 4))])
def test_the_size_of_a_file_is_that_of_the_image_as_it_is_decoded(
    tmp_path: Path, upright: bool, expected: tuple[int, int]
) -> None:
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=turned)
    form = ImageForm(3, expected[1], expected[0], "stretch", upright=upright)
    assert form.file_size(tmp_path / "a.jpg") == expected


def test_the_colours_of_classes_differ() -> None:
    colors = mask_colors(255)
    assert len(np.unique(colors, axis=0)) == 255
    assert len(set(FIXED)) == 20
    assert np.array_equal(mask_colors(30)[:20], mask_colors(20))
