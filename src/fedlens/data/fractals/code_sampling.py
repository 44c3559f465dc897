"""Samples codes of fractals whose attractors are well spread (Anderson and Farrell 2022)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.fractals.codes import FEWEST, MOST, FractalCodes
from fedlens.data.fractals.rendering import filled_shares
from fedlens.data.partition.drawing import streams

VERSION = 1  # of the draws: raised when the same seed gives other codes
_BLOCK = 512  # codes drawn at once
_TRIES = 200  # blocks before the conditions are called too strict
_RARE = 1e-3  # the share of kept codes below which they are


def sample_codes(
    count: int, seed: int, maps: tuple[int, int] = (FEWEST, MOST), least_filled: float = 0.1
) -> FractalCodes:
    """Draws codes whose attractors are neither a point nor a cloud (Anderson and Farrell 2022, section 3).

    The number n of maps is uniform in `maps`. The linear part of each map is R(theta) diag(s1, s2) R(phi) D with
    uniform angles, singular values 1 > s1 >= s2 >= 0, and D = diag(+-1, +-1). The sum of s1 + 2 s2 over the maps is
    uniform in [(5 + n) / 2, (6 + n) / 2]. Translations are uniform in [-1, 1].

    Args:
        count: the number of codes.
        seed: of the draw; the codes depend on nothing else.
        maps: the smallest and the largest number of maps, within 2 to 8.
        least_filled: the share of a 32x32 image that 1,000 points must reach. Other codes are drawn again.

    Raises `ConfigError` if an argument is out of range, or next to no code fulfils the conditions.

    >>> sample_codes(100, seed=0).maps.shape
    (100, 8, 6)
    """
    if count < 1:
        raise ConfigError(f"the number of codes is {count}, but must be at least 1", where="codes")
    if not FEWEST <= maps[0] <= maps[1] <= MOST:
        raise ConfigError(
            f"the numbers of maps are {list(maps)}, but must be within {FEWEST} to {MOST}, smallest first",
            where="maps",
        )
    if not 0 <= least_filled < 1:
        raise ConfigError(f"the share is {least_filled}, but must be in [0, 1)", where="least_filled")
    (stream,) = streams(seed, 1)
    kept: list[FractalCodes] = []
    total = refused = blocks = 0
    while total < count:
        drawn = _drawn(stream, _BLOCK, maps)
        good = filled_shares(drawn) >= least_filled
        kept.append(drawn.take(np.flatnonzero(good)))
        # Those after the last code that is needed were not asked for.
        needed = np.flatnonzero(good)[: count - total]
        looked_at = int(needed[-1]) + 1 if total + int(good.sum()) >= count else _BLOCK
        refused += looked_at - len(needed)
        total += int(good.sum())
        blocks += 1
        if blocks >= _TRIES and total < min(count, _RARE * blocks * _BLOCK):
            raise ConfigError(
                f"only {total:,} of {blocks * _BLOCK:,} codes fill {least_filled:.0%} of their image",
                where="least_filled",
                hint="lower it; 0.1 keeps most codes",
            )
    return FractalCodes(
        np.concatenate([part.maps for part in kept])[:count],
        np.concatenate([part.counts for part in kept])[:count],
        refused,
    )


def _drawn(stream: np.random.RandomState, count: int, maps: tuple[int, int]) -> FractalCodes:
    """Codes that fulfil the conditions on singular values; nothing is known of their images."""
    counts = maps[0] + np.floor(stream.random_sample(count) * (maps[1] - maps[0] + 1)).astype(np.int64)
    left = (5 + counts + stream.random_sample(count)) / 2
    angles = 2 * np.pi * stream.random_sample((count, MOST, 2))
    places = stream.random_sample((count, MOST, 2))
    signs = np.where(stream.random_sample((count, MOST, 2)) < 0.5, -1.0, 1.0)
    shifts = 2 * stream.random_sample((count, MOST, 2)) - 1
    values = _singular_values_of(left, counts, places)
    drawn = np.concatenate([_linear_parts(angles, values, signs), shifts], axis=2)
    drawn[np.arange(MOST) >= counts[:, None]] = 0
    return FractalCodes(drawn, counts)


def _singular_values_of(
    total: NDArray[np.float64], counts: NDArray[np.int64], places: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64 [n, 8, 2]: singular values s1 >= s2 of the maps, with the sum of s1 + 2 s2 equal to `total`.

    `places` in [0, 1) says where between its bounds each value lies. A map contributes at most 3, which bounds what
    the maps after it have to take.
    """
    values = np.zeros((*places.shape[:2], 2))
    left = total.copy()
    for j in range(places.shape[1]):
        now = j < counts
        after = 3.0 * np.maximum(counts - j - 1, 0)
        least, most = np.maximum(0.0, left - after) / 3, np.minimum(1.0, left)
        s1 = least + places[:, j, 0] * (most - least)
        least, most = np.maximum(0.0, (left - after - s1) / 2), np.minimum(s1, (left - s1) / 2)
        s2 = np.minimum(least + places[:, j, 1] * (most - least), s1)
        last = j == counts - 1
        s2 = np.where(last, (left - s1) / 2, s2)
        values[now, j] = np.stack([s1, s2], axis=1)[now]
        left = np.where(now, left - s1 - 2 * s2, left)
    return values


def _linear_parts(
    angles: NDArray[np.float64], values: NDArray[np.float64], signs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64 [n, 8, 4]: a, b, c, d of R(theta) diag(s1, s2) R(phi) D.

    Written out, because a matrix product adds in an order that depends on the machine.
    """
    cos, sin = np.cos(angles), np.sin(angles)
    (c1, c2), (n1, n2) = (np.moveaxis(part, -1, 0) for part in (cos, sin))
    s1, s2 = np.moveaxis(values, -1, 0)
    left, right = np.moveaxis(signs, -1, 0)
    return np.stack(
        [
            (c1 * s1 * c2 - n1 * s2 * n2) * left,
            (-c1 * s1 * n2 - n1 * s2 * c2) * right,
            (n1 * s1 * c2 + c1 * s2 * n2) * left,
            (-n1 * s1 * n2 + c1 * s2 * c2) * right,
        ],
        axis=-1,
    )
