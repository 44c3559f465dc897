"""Clients with the same label distribution and different image features."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.partition.drawing import check_population, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Clients
from fedlens.data.table import Table

# The value that does not change an image, for each feature of `fedlens.data.shifts`.
NEUTRAL = {"brightness": 1.0, "contrast": 1.0, "blur": 0.0, "rotation": 0.0, "noise": 0.0}


@partitioner
def feature(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    brightness: Annotated[
        float, Field(ge=0, le=1, description="a client's factor is uniform in [1 - b, 1 + b]")
    ] = 0.3,
    contrast: Annotated[
        float, Field(ge=0, le=1, description="a client's factor is uniform in [1 - c, 1 + c]")
    ] = 0.3,
    blur: Annotated[
        float,
        Field(ge=0, le=100, description="a client's standard deviation is uniform in [0, blur], in pixels"),
    ] = 0.7,
    rotation: Annotated[
        float,
        Field(
            ge=0,
            le=180,
            description="a client's angle is uniform in [-r, r], in degrees; 0 for masks or boxes",
        ),
    ] = 15.0,
    noise: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="a client's standard deviation is uniform in [0, noise]; 1 is black to white",
        ),
    ] = 0.05,
) -> Partition:
    """The same label distribution everywhere, and different image features for each client.

    Not from a paper: it separates feature skew from label skew, which occur together in collected data. (`mix`
    combines them to any degree: a label partition outside and `feature` with `clients = 1` inside.)

    The labels are split evenly: the examples are shuffled, sorted by class, and dealt like cards to the clients in a
    random order. So any two clients differ by at most one example in size, and by at most one in each class. Examples
    with several classes or none are dealt in a random order. Nothing is discarded.

    Each client k then draws one independent number for each setting above 0:

        brightness_k ~ U[1 - b, 1 + b],   contrast_k ~ U[1 - c, 1 + c],   blur_k ~ U[0, blur],
        rotation_k ~ U[-r, r],            noise_k ~ U[0, noise].

    `Partition.features` holds the numbers by name; they are saved with it, and are part of its digest.
    `fedlens.data.shifts.shifted` applies them to an image. Setting one to 0 does not change the others. The test split
    is not changed.

    Raises `ConfigError` if every setting is 0 or one is out of range, if there are more clients than examples, and if
    images with masks or boxes would be rotated, because masks and boxes are not.

    >>> labels = np.repeat(np.arange(10), 60)
    >>> p = feature(labels, 0, clients=4, brightness=0.5, blur=0)
    >>> round(p.emd(labels), 12), sorted(p.features)
    (0.0, ['brightness', 'contrast', 'noise', 'rotation'])
    """
    table = Table.of(labels)
    check_population(len(table), clients)
    widths = {
        "brightness": brightness,
        "contrast": contrast,
        "blur": blur,
        "rotation": rotation,
        "noise": noise,
    }
    _check(widths, table.turnable)
    shuffling, dealing, *drawing = streams(seed, 2 + len(widths))
    order = shuffling.permutation(len(table))
    if table.single:
        order = order[np.argsort(table.labels[order], kind="stable")]
    owners = np.empty(len(table), np.int64)
    owners[order] = dealing.permutation(clients)[np.arange(len(table)) % clients]
    features = {
        name: _drawn(name, width, clients, stream)
        for (name, width), stream in zip(widths.items(), drawing, strict=True)
        if width > 0
    }
    return replace(Partition.of_owners(owners, clients), features=features)


def _drawn(name: str, width: float, clients: int, stream: np.random.RandomState) -> NDArray[np.float64]:
    """float64 [clients]: around the neutral value, or from it upwards for blur and noise."""
    uniform = stream.random_sample(clients)
    drawn: NDArray[np.float64] = NEUTRAL[name] + width * (
        uniform if name in ("blur", "noise") else 2 * uniform - 1
    )
    return drawn


def _check(widths: dict[str, float], turnable: bool) -> None:
    if not any(widths.values()):
        raise ConfigError(
            "all clients would see the same images",
            where="brightness",
            hint=f"set one of {', '.join(widths)} above 0, or use iid",
        )
    if widths["rotation"] and not turnable:
        raise ConfigError(
            "rotation would turn the images, but not their masks or boxes",
            where="rotation",
            hint="set rotation = 0",
        )
