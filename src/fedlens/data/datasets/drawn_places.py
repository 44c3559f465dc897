"""Draws a place for each example of a dataset without coordinates, so that classes cluster in places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedlens.data.partition.drawing import streams

REGIONS = 20
REGIONS_OF_GROUP = 3
CENTRES = (0.4, 0.3, 0.2, 0.1)  # shares of a class's images around each of its centres
REGION_WIDTH = 0.15  # radians per axis: about 1,000 km
CENTRE_WIDTH = 0.05  # about 300 km


def drawn_places(
    labels: NDArray[np.int64], groups: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(latitudes [n], longitudes [n]) in degrees, drawn; nothing published says where the images were taken.

    1. 20 regions lie uniformly on the sphere. Region r (from 1 on) is popular in proportion to 1 / r.
    2. A group of classes lives in 3 regions, drawn by their popularity.
    3. A class has 4 centres. Each lies around a region of its group, with a standard deviation of 0.15 radians.
    4. An image lies around one of its class's centres, which have 40, 30, 20 and 10 % of its images. Its displacement
       is 0.05 radians times a Cauchy (t_1) vector, so the places of a class have a heavy tail.

    Args:
        labels: int64 [n], the class of each example.
        groups: int64 [classes], the group of each class.
        seed: of all draws.

    >>> lat, lon = drawn_places(np.array([0, 1, 1]), np.array([0, 0]), seed=0)
    >>> lat.shape, bool((abs(lat) <= 90).all() and (abs(lon) <= 180).all())
    ((3,), True)
    """
    homes, centres, images = streams(seed, 3)
    regions = _unit(homes.standard_normal((REGIONS, 3)))
    popularity = 1 / np.arange(1, REGIONS + 1)
    shape = (int(groups.max()) + 1, REGIONS_OF_GROUP)
    regions_of = homes.choice(REGIONS, shape, p=popularity / popularity.sum())
    home = centres.randint(REGIONS_OF_GROUP, size=(len(groups), len(CENTRES)))
    offsets = REGION_WIDTH * centres.standard_normal((*home.shape, 3))
    centres_of = _unit(regions[regions_of[groups[:, None], home]] + offsets)
    centre = images.choice(len(CENTRES), len(labels), p=CENTRES)
    cauchy = images.standard_normal((len(labels), 3)) / np.abs(images.standard_normal((len(labels), 1)))
    x, y, z = _unit(centres_of[labels, centre] + CENTRE_WIDTH * cauchy).T
    return np.degrees(np.arcsin(z.clip(-1, 1))), np.degrees(np.arctan2(y, x))


def _unit(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The points [..., 3] moved along their rays to the unit sphere."""
    lengths: NDArray[np.float64] = np.linalg.norm(points, axis=-1, keepdims=True)
    return points / lengths
