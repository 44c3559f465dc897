"""The renderers of fractals: against a loop in Python, and against each other."""

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.data.datasets.fractals import fractals
from fedlens.data.fractals import numba_renderer, numpy_renderer, rendering
from fedlens.data.fractals.code_sampling import sample_codes
from fedlens.data.fractals.codes import FractalCodes, thresholds
from fedlens.data.fractals.drawings import Drawings, Look, words_of
from fedlens.data.fractals.images import FractalImages, FractalStyle

CODES = sample_codes(20, seed=4)
RENDERERS = (numba_renderer, numpy_renderer)
MASK = 2**64 - 1


def split_mix(state: int) -> tuple[int, int]:
    """The next state and number of SplitMix64, written with Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def played(drawings: Drawings, f: int) -> list[tuple[float, float]]:
    """The points of one fractal, from a chaos game in a loop."""
    maps, bounds, state = drawings.maps[f].tolist(), drawings.bounds[f].tolist(), int(drawings.seeds[f])
    a, b, c, d, e, g = maps[0]
    determinant = (1.0 - a) * (1.0 - d) - b * c
    x, y = ((1.0 - d) * e + b * g) / determinant, ((1.0 - a) * g + c * e) / determinant
    points, word = [], 0
    for step in range(drawings.iterations):
        if step % 2 == 0:
            state, word = split_mix(state)
        pick = word % 2**32 if step % 2 == 0 else word // 2**32
        j = next(j for j in range(8) if pick < bounds[j])
        a, b, c, d, e, g = maps[j]
        x, y = a * x + b * y + e, c * x + d * y + g
        points.append((x, y))
    return points


def drawn(look: Look = Look.HUE_BY_DENSITY, count: int = 6, **style: object) -> Drawings:
    images = FractalImages(
        CODES,
        FractalStyle(look=look, iterations=200, **style),  # type: ignore[arg-type]
        np.arange(count),
        seed=1,
    )
    return images.drawings(images.numbers, np.arange(count, dtype=np.uint64))


def test_the_words_are_those_of_split_mix() -> None:
    state, numbers = 12345, []
    for _ in range(5):
        state, number = split_mix(state)
        numbers.append(number)
    assert words_of(np.array([12345], np.uint64), 5)[0].tolist() == numbers


@pytest.mark.parametrize("renderer", RENDERERS)
def test_points_fall_where_the_loop_puts_them(renderer: object) -> None:
    drawings = drawn()
    counts = renderer.histograms(drawings)  # type: ignore[attr-defined]
    for f in range(len(drawings.seeds)):
        points = np.array(played(drawings, f))
        low, high = points.min(axis=0), points.max(axis=0)
        width, height = drawings.boxes[f, 2:]
        expected = np.zeros((32, 32), int)
        for x, y in points:
            column = min(int((x - low[0]) * (width / (high[0] - low[0]))), width - 1)
            row = min(int((y - low[1]) * (height / (high[1] - low[1]))), height - 1)
            column = width - 1 - column if drawings.flips[f] & 1 else column
            row = height - 1 - row if drawings.flips[f] & 2 else row
            expected[row, column] += 1
        np.testing.assert_array_equal(counts[f], expected)


@settings(max_examples=25, deadline=None)
@given(
    look=st.sampled_from(Look),
    background=st.booleans(),
    channels=st.sampled_from([1, 3]),
    size=st.integers(8, 40),
    fractals=st.tuples(st.integers(1, 3), st.integers(3, 8)),
    seed=st.integers(0, 2**62),
)
def test_compiled_code_draws_what_numpy_draws(
    look: Look, background: bool, channels: int, size: int, fractals: tuple[int, int], seed: int
) -> None:
    style = FractalStyle(size, channels, 100, fractals, look, background)
    images = FractalImages(CODES, style, np.arange(3), seed=0)
    drawings = images.drawings(images.numbers, words_of(np.array([seed], np.uint64), 3)[0])
    np.testing.assert_array_equal(numba_renderer.histograms(drawings), numpy_renderer.histograms(drawings))
    compiled = numba_renderer.render(drawings).astype(int)
    plain = numpy_renderer.render(drawings).astype(int)
    assert abs(compiled - plain).max() <= 1


@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_triangle_of_sierpinski_is_drawn(renderer: object) -> None:
    """Three maps halve the way to the corners of a triangle: its middle stays empty."""
    maps = np.zeros((1, 8, 6))
    maps[0, :3] = [[0.5, 0, 0, 0.5, 0, 0], [0.5, 0, 0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5, 0, 0.5]]
    drawings = rendering.whole_images(FractalCodes(maps, np.array([3])), 64, 20_000)
    image = renderer.render(drawings)[0, 0]  # type: ignore[attr-defined]
    rows, columns = np.nonzero(image)
    assert (rows + columns < 66).all()  # below the diagonal
    assert not image[17:31, 33:47][np.add.outer(np.arange(14), np.arange(14)) > 14].any()
    assert image[0, 0] == image[0, 62] == image[62, 0] == 255
    # The dimension is log 3 / log 2: at half the resolution a third of the pixels are hit.
    coarse = image.reshape(32, 2, 32, 2).max(axis=(1, 3))
    assert (image > 0).sum() / (coarse > 0).sum() == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize(("flip", "axes"), [(1, (1,)), (2, (0,)), (3, (0, 1))])
def test_flips_mirror_the_box(renderer: object, flip: int, axes: tuple[int, ...]) -> None:
    drawings = rendering.whole_images(sample_codes(3, seed=0), 32, 500)
    flipped = replace(drawings, flips=np.full(3, flip))
    counts, mirrored = (renderer.histograms(each) for each in (drawings, flipped))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(mirrored, np.flip(counts, [axis + 1 for axis in axes]))


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_code_that_diverges_draws_nothing(renderer: object) -> None:
    maps = np.zeros((2, 8, 6))
    maps[:, 0] = [1.5, 0, 0, 1.5, 1, 1]
    maps[0, 1] = [2.0, 0, 0, 2.0, 0.5, 0.5]
    maps[1, 1] = [0.5, 0, 0, 0.5, 0.5, 0.25]
    maps[1, 0] = [0.5, 0, 0, 0.5, 0, 0]
    codes = FractalCodes(maps, np.array([2, 2]))
    drawings = rendering.whole_images(codes, 32, 1000)
    counts = renderer.histograms(drawings)  # type: ignore[attr-defined]
    assert counts.sum(axis=(1, 2)).tolist() == [0, 1000]
    assert not renderer.render(drawings)[0].any()  # type: ignore[attr-defined]
    assert rendering.filled_shares(codes)[0] == 0


@pytest.mark.parametrize("renderer", RENDERERS)
def test_later_fractals_cover_earlier_ones(renderer: object) -> None:
    drawings = drawn(Look.BINARY, count=1, fractals=(3, 3))
    parts = [
        replace(
            drawings,
            offsets=np.array([0, 1]),
            **{
                name: getattr(drawings, name)[f : f + 1]
                for name in ("maps", "bounds", "seeds", "boxes", "flips", "colours")
            },
        )
        for f in range(3)
    ]
    alone = np.max([renderer.render(part)[0] for part in parts], axis=0)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(renderer.render(drawings)[0], alone)  # type: ignore[attr-defined]


def test_a_smooth_background_stands_behind_the_fractal() -> None:
    with_one, without = drawn(background=True), drawn(background=False)
    pictures, plain = rendering.render(with_one), rendering.render(without)
    hit = plain.max(axis=1, keepdims=True) > 0
    np.testing.assert_array_equal(np.where(hit, pictures, 0), plain)
    assert (pictures.max(axis=1) > 0).mean() > 0.99
    # Interpolated: neighbours differ little where no fractal is.
    steps = np.abs(np.diff(pictures.astype(int), axis=3))
    assert steps[~(hit[..., 1:] | hit[..., :-1]).repeat(3, axis=1)].max() <= 255 * 3 / 31 + 1


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (ModuleNotFoundError("No module named 'numba'", name="numba"), "Numba is not installed"),
        (
            ImportError("Numba needs NumPy 1.9 or less"),
            "Numba cannot be imported: ImportError: Numba needs NumPy",
        ),
    ],
)
def test_without_numba_numpy_draws_the_same(
    fault: ImportError, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawings = drawn()
    compiled = rendering.render(drawings)
    asked = builtins.__import__

    def refuses(name: str, *more: Any, **others: Any) -> Any:
        if name == "fedlens.data.fractals.numba_renderer":
            raise fault
        return asked(name, *more, **others)

    rendering.why_slow.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuses)
    try:
        np.testing.assert_array_equal(rendering.render(drawings), compiled)
        notes = fractals(Path(), False, 0, train=8, test=4, codes=20).notes
        assert any(
            note.startswith(why) and note.endswith("pip install 'fedlens[fractals]'") for note in notes
        )
    finally:
        rendering.why_slow.cache_clear()


def test_thresholds_of_jittered_maps_follow_their_determinants() -> None:
    drawings = drawn()
    weights = np.abs(np.linalg.det(drawings.maps[..., :4].reshape(-1, 8, 2, 2)))
    shares = np.diff(np.concatenate([np.zeros((len(weights), 1)), drawings.bounds / 2.0**32], axis=1))
    expected = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, expected, atol=2e-3)
    assert (thresholds(drawings.maps, (weights > 0).sum(axis=1)) == drawings.bounds).all()
