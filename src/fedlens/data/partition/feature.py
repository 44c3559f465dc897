"""Clients with the same labels that see their images differently."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.core.errors import ConfigError
from fedlens.data.partition.drawing import check_population, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Clients
from fedlens.data.table import Table

# What leaves an image as it is, for every way in which `fedlens.data.shifts` can change one.
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
    """The same labels everywhere, but each client sees its images in its own way.

    Beyond the documents: it tells feature skew apart from label skew, which in collected data come together.
    (`mix` puts them together again, by any measure: a label partition outside and `feature` with `clients = 1`
    inside.)

    The labels are split evenly: the examples are put in a random order, sorted by class, and dealt like cards to
    the clients in a random order. So any two clients differ by at most one example in size, and by at most one in
    each class. Examples with several classes or none are dealt in a random order. Nothing is discarded.

    Each client k then draws one number for each setting that is above 0, independent of the others, and of the
    other clients:

        brightness_k ~ U[1 - b, 1 + b],   contrast_k ~ U[1 - c, 1 + c],   blur_k ~ U[0, blur],
        rotation_k ~ U[-r, r],            noise_k ~ U[0, noise].

    They stand in `Partition.features` by name, are saved with it, and are part of its digest. What they do to an
    image says `fedlens.data.shifts.shifted`. Setting one to 0 changes nothing about the others. The test split is
    seen as it is.

    Raises `ConfigError` where every setting is 0 or one is out of range, where there are more clients than
    examples, and where images with masks or boxes would be rotated, which stay as they are.

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
    _check(widths, table.single)
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
    """float64 [clients]: around what is neutral both ways, or from it upwards where there is no other way."""
    uniform = stream.random_sample(clients)
    drawn: NDArray[np.float64] = NEUTRAL[name] + width * (
        uniform if name in ("blur", "noise") else 2 * uniform - 1
    )
    return drawn


def _check(widths: dict[str, float], single: bool) -> None:
    if not any(widths.values()):
        raise ConfigError(
            "the clients would all see the same",
            where="brightness",
            hint=f"set one of {', '.join(widths)} above 0, or take iid",
        )
    if widths["rotation"] and not single:
        raise ConfigError(
            "rotation would turn the images, and leave their masks or boxes as they are",
            where="rotation",
            hint="set rotation = 0",
        )
