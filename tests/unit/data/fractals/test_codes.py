"""Codes of fractals: the conditions of Anderson and Farrell 2022, and their files."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.fractals.code_sampling import sample_codes
from fedlens.data.fractals.codes import (
    FractalCodes,
    singular_values,
    thresholds,
)
from fedlens.data.fractals.rendering import filled_shares


@pytest.fixture(scope="module")
def codes() -> FractalCodes:
    return sample_codes(2000, seed=3, least_filled=0)


def test_the_sum_of_singular_values_lies_within_the_bounds_of_the_paper(codes: FractalCodes) -> None:
    linear = codes.maps[..., :4].reshape(-1, 8, 2, 2)
    values = np.linalg.svd(linear, compute_uv=False)
    total = (values[..., 0] + 2 * values[..., 1]).sum(axis=1)
    assert (total >= (5 + codes.counts) / 2 - 1e-9).all()
    assert (total <= (6 + codes.counts) / 2 + 1e-9).all()
    # Uniform in between.
    assert kstest(2 * total - 5 - codes.counts, "uniform").pvalue > 0.001
    np.testing.assert_allclose(singular_values(codes.maps), values, atol=1e-9)


def test_every_map_contracts_and_its_singular_values_are_in_order(codes: FractalCodes) -> None:
    used = np.arange(8) < codes.counts[:, None]
    values = singular_values(codes.maps)
    np.testing.assert_allclose(
        values, np.linalg.svd(codes.maps[..., :4].reshape(-1, 8, 2, 2), compute_uv=False), atol=1e-9
    )
    assert (values[used] < 1).all()
    assert (values[..., 0] >= values[..., 1]).all()
    assert (codes.maps[~used] == 0).all()
    assert (np.abs(codes.maps[..., 4:]) <= 1).all()


def test_numbers_of_maps_angles_and_signs_are_uniform(codes: FractalCodes) -> None:
    assert chisquare(np.bincount(codes.counts, minlength=9)[2:]).pvalue > 0.001
    first = codes.maps[:, 0, :4].reshape(-1, 2, 2)
    assert chisquare([(np.linalg.det(first) > 0).sum(), (np.linalg.det(first) < 0).sum()]).pvalue > 0.001
    assert kstest(codes.maps[:, 0, 4], "uniform", (-1, 2)).pvalue > 0.001


def test_more_codes_begin_with_the_same_ones() -> None:
    few, many = sample_codes(10, seed=1), sample_codes(5000, seed=1)
    np.testing.assert_array_equal(few.maps, many.maps[:10])
    assert few.digest != sample_codes(10, seed=2).digest
    assert few.digest == sample_codes(10, seed=1).digest


def test_codes_that_fill_little_are_drawn_again_and_counted(codes: FractalCodes) -> None:
    shares = filled_shares(codes)
    strict = sample_codes(100, seed=3, least_filled=0.3)
    kept = np.flatnonzero(shares >= 0.3)[:100]
    np.testing.assert_array_equal(strict.maps, codes.maps[kept])
    assert strict.refused == kept[-1] + 1 - 100


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"count": 0}, "codes"),
        ({"maps": (1, 4)}, "maps"),
        ({"maps": (5, 4)}, "maps"),
        ({"least_filled": 1.0}, "least_filled"),
        ({"least_filled": 0.99, "count": 1}, "least_filled"),
        ({"least_filled": 0.58, "count": 100}, "least_filled"),  # 1 in 20,000 fulfils it
    ],
)
def test_settings_out_of_range_are_refused(
    settings: dict[str, object], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlens.data.fractals.code_sampling._TRIES", 2)
    with pytest.raises(ConfigError) as caught:
        sample_codes(**{"count": 3, "seed": 0, **settings})  # type: ignore[arg-type]
    assert caught.value.where == where


def test_a_file_gives_the_same_codes(tmp_path: Path) -> None:
    codes = sample_codes(5, seed=0)
    codes.save(tmp_path / "codes.npz")
    again = FractalCodes.load(tmp_path / "codes.npz")
    assert (again.digest, again.refused) == (codes.digest, codes.refused)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "codes.npz"
    with pytest.raises(DataError, match="does not exist"):
        FractalCodes.load(path)
    sample_codes(5, seed=0).save(path)
    whole = path.read_bytes()
    for content in (b"", whole[:-200], b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"no codes of fractals can be read.*codes\.npz"):
            FractalCodes.load(path)
    np.savez(path, format=1, maps=np.full((1, 8, 6), np.nan), counts=np.array([2]), refused=0)
    with pytest.raises(DataError, match="not finite"):
        FractalCodes.load(path)


def test_maps_are_picked_in_proportion_to_their_determinants() -> None:
    maps = np.zeros((1, 8, 6))
    maps[0, :3, 0] = 0.5
    maps[0, :3, 3] = [0.1, 0.2, 0.5]
    bounds = thresholds(maps, [3])[0]
    assert bounds.tolist() == [2**32 // 8, 3 * 2**32 // 8, *[2**32] * 6]


def test_a_map_of_determinant_zero_is_picked_sometimes() -> None:
    maps = np.zeros((1, 8, 6))
    maps[0, 0] = [0.5, 0, 0, 0.5, 0, 0]
    maps[0, 1] = [0.5, 0, 0, 0, 1, 1]
    assert 0 < 2**32 - thresholds(maps, [2])[0, 0] < 2**23
