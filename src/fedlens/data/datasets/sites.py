"""The dataset of a real federation: its training examples are at the sites, and only their form is known here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.boxes import Boxes
from fedlens.data.dataset import Dataset, Examples

Channels = Annotated[list[float] | None, Field(min_length=1, max_length=64)]


def sites(
    root: Path,
    download: bool,
    seed: int,
    *,
    classes: Annotated[
        list[str], Field(min_length=1, description="the classes; sites map their labels to them")
    ],
    input_shape: Annotated[
        list[Annotated[int, Field(ge=1, le=16384)]],
        Field(min_length=3, max_length=3, description="channels, height and width of an image"),
    ],
    kind: Annotated[
        Literal["classification", "multi-label", "segmentation", "detection"], Field(description="the task")
    ] = "classification",
    mean: Annotated[
        Channels,
        Field(
            description="of each channel, of images scaled to [0, 1]; without it the sites sum their images"
        ),
    ] = None,
    std: Annotated[Channels, Field(description="the standard deviation of each channel")] = None,
    test: Annotated[
        dict[str, Any] | str | None,
        Field(description="a dataset at the server, whose test images measure the model"),
    ] = None,
) -> Dataset:
    """No example: the form of those at the sites. `root`, `download` and `seed` are not used.

    The test split is empty; `fedlens.data.sites` adds that of `test`.

    Raises `ConfigError` if classes repeat, or only one of mean and std is given, or not for each channel.

    >>> data = sites(Path(), False, 0, classes=["no", "yes"], input_shape=[1, 8, 8], mean=[0.3], std=[0.2])
    >>> data.at_sites, data.input_shape, len(data.train), data.mean
    (True, (1, 8, 8), 0, (0.3,))
    """
    where = "data.dataset"
    if len(set(classes)) < len(classes):
        raise ConfigError("a class is named twice", where=f"{where}.classes", hint="name each class once")
    channels, height, width = input_shape
    if (mean is None) != (std is None):
        raise ConfigError(
            "mean and std are given together, or neither", where=where, hint="add the other one"
        )
    if mean is not None and std is not None and not len(mean) == len(std) == channels:
        raise ConfigError(
            f"mean and std need a number for each of the {channels} channels",
            where=f"{where}.mean",
            hint="correct them",
        )
    if std is not None and min(std) <= 0:
        raise ConfigError("a standard deviation is above 0", where=f"{where}.std", hint="correct it")
    nothing = blank_examples(kind, 0, len(classes), (channels, height, width))
    return Dataset(
        "sites",
        nothing,
        nothing,
        tuple(classes),
        tuple(mean or (0.0,) * channels),
        tuple(std or (1.0,) * channels),
        licence="as the sites say",
        source="the sites of the federation",
        at_sites=True,
    )


def blank_examples(kind: str, n: int, classes: int, shape: tuple[int, ...]) -> Examples:
    """`n` examples of noise in the form of those at sites, with targets of class 0 or of all classes in turn."""
    _, height, width = shape
    images = np.random.default_rng(0).integers(0, 256, (n, *shape), np.uint8)
    turn = np.arange(n) % classes
    targets: Any = turn
    if kind == "detection":
        corners = np.tile(np.array([0, 0, width / 2, height / 2], np.float32), (n, 1))
        targets = Boxes(corners, turn, np.arange(n + 1))
    elif kind == "segmentation":
        targets = np.zeros((n, height, width), np.uint8)
    elif kind == "multi-label":
        targets = np.eye(classes, dtype=np.uint8)[turn]
    return Examples(images, targets)
