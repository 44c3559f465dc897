"""Images of fractals, to pre-train on where no data may be used (chen2022, section 5)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.datasets.dataset_files import published
from fedlens.data.fractals.code_sampling import VERSION, sample_codes
from fedlens.data.fractals.codes import FEWEST, MOST, FractalCodes
from fedlens.data.fractals.drawings import Look
from fedlens.data.fractals.images import FractalImages, FractalStyle
from fedlens.data.fractals.rendering import why_slow
from fedlens.data.images import sample_moments
from fedlens.files.caches import user_cache

_SMALL, _FEW, _MANY = 32, 1_000, 100_000  # pixels up to which few points are enough
_SAMPLE = 1000  # images for the mean and the deviation
_CACHED = 10_000  # codes from which a file is worth keeping
_LOOKS = {
    "binary": Look.BINARY,
    "density": Look.DENSITY,
    "hue-by-density": Look.HUE_BY_DENSITY,
    "hue-by-position": Look.HUE_BY_POSITION,
}

LookName = Literal["binary", "density", "hue-by-density", "hue-by-position"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(gt=0, le=2)]
Labels = Annotated[
    Literal["none", "one", "several"],
    Field(
        description='"one": the code of the only fractal is the class; "several": the codes of all fractals'
    ),
]
Pairs = Annotated[
    bool, Field(description="the two views of an unlabelled image are two drawings of its codes")
]
Size = Annotated[int, Field(ge=8, le=1024, description="side of an image in pixels")]
TrainImages = Annotated[
    int | None,
    Field(ge=1, description="number of training images; default 1,000,000, with labels 100,000"),
]
Codes = Annotated[int | None, Field(ge=1, description="number of codes; default 100,000, with labels 1,000")]
Maps = Annotated[tuple[int, int], Field(description="fewest and most maps of a code, within 2 to 8")]
PerImage = Annotated[
    tuple[Count, Count] | None,
    Field(description='fewest and most fractals on an image; default [2, 5], with labels "one" [1, 1]'),
]
Iterations = Annotated[
    int | None,
    Field(ge=10, description="points of a fractal; default 1,000 up to 32 pixels, 100,000 above"),
]
Scale = Annotated[
    tuple[Share, Share], Field(description="smallest and largest side of a fractal, as shares of size")
]
Jitter = Annotated[
    tuple[Factor, Factor],
    Field(description="a random map of a code is multiplied by a factor between these"),
]
LeastFilled = Annotated[
    float, Field(ge=0, lt=1, description="share of pixels that a code must reach, else it is drawn again")
]


def fractals(
    root: Path,
    download: bool,
    seed: int,
    *,
    labels: Labels = "none",
    pairs: Pairs = True,
    size: Size = 32,
    channels: Annotated[Literal[1, 3], Field(description="3 for colour, 1 for grey")] = 3,
    train: TrainImages = None,
    test: Annotated[int, Field(ge=1, description="number of test images")] = 1000,
    codes: Codes = None,
    maps: Maps = (FEWEST, MOST),
    fractals: PerImage = None,
    iterations: Iterations = None,
    look: Annotated[LookName, Field(description="colouring")] = "hue-by-density",
    background: Annotated[Literal["black", "smooth"], Field(description="background")] = "black",
    scale: Scale = (0.4, 0.9),
    jitter: Jitter = (0.8, 1.1),
    least_filled: LeastFilled = 0.1,
) -> Dataset:
    """Fractals on a black or smooth background, drawn when a batch is read, in every training step anew.

    Each image has codes of its own: `fractals` of the `codes`, uniformly and without repetition. A drawing varies
    their places, sizes, flips and colours, and jitters their maps. The published methods are settings of this dataset:

    - fractal pair similarity (chen2022, section 5.2): the defaults, for the tasks `simsiam` and `moco-v2`;
    - the same without pairs, "Fractal + SimSiam" in its table 2: `pairs = false`;
    - multi-label fractals (Anderson and Farrell 2022): `labels = "several"`;
    - single-label fractals (Kataoka et al. 2020): `labels = "one"`.

    `root` is not used. 10,000 codes and more are kept in the user's cache folder.

    Raises `ConfigError` if settings do not fit each other, or next to no code fulfils the conditions.

    >>> data = fractals(Path(), False, 0, train=20, test=4, codes=10)
    >>> data.kind, data.train.inputs.shape
    ('unlabelled', (20, 3, 32, 32))
    """
    _refuse_reversed(scale=scale, jitter=jitter)
    labelled = labels != "none"
    if labels == "one" and fractals not in (None, (1, 1)):
        raise ConfigError(
            f"an image with one label has one fractal, but fractals is {fractals}",
            where="fractals",
            hint='remove it, or set labels = "several"',
        )
    images = train or (100_000 if labelled else 1_000_000)
    if labels == "one" and images < (codes or 1_000):
        raise ConfigError(
            f"{images:,} training images with one code each are too few for {codes or 1_000:,} codes: those of "
            "test images would not occur in training",
            where="train",
            hint=f"set codes = {images}, or train = {codes or 1_000}",
        )
    known = codes_of(codes or (1_000 if labelled else 100_000), seed, maps, least_filled)
    style = FractalStyle(
        size=size,
        channels=channels,
        iterations=iterations or (_FEW if size <= _SMALL else _MANY),
        fractals=(1, 1) if labels == "one" else fractals or (2, 5),
        look=_LOOKS[look],
        background=background == "smooth",
        scale=scale,
        jitter=jitter,
        pairs=pairs and not labelled,
    )
    splits = [
        _examples(FractalImages(known, style, numbers, seed, single=labels == "one"), labels)
        for numbers in (np.arange(images), np.arange(images, images + test))
    ]
    sample = splits[0].inputs.take(np.arange(min(images, _SAMPLE)))
    return published(
        "fractals",
        splits,
        tuple(f"code {number}" for number in range(len(known))) if labelled else (),
        moments=sample_moments(sample),
        notes=_notes(known, least_filled),
        seeded=True,
        source=f"fedlens, fractals, seed {seed}",
    )


def codes_of(count: int, seed: int, maps: tuple[int, int], least_filled: float) -> FractalCodes:
    """The codes of `sample_codes`; many codes come from a file in the user's cache folder, if it is there."""
    if count < _CACHED:
        return sample_codes(count, seed, maps, least_filled)
    name = f"codes-v{VERSION}-{count}-seed{seed}-maps{maps[0]}to{maps[1]}-filled{least_filled!r}.npz"
    path = user_cache("fractals") / name
    with suppress(DataError):
        found = FractalCodes.load(path)
        if len(found) == count:
            return found
    codes = sample_codes(count, seed, maps, least_filled)
    with suppress(OSError):  # a file that cannot be written costs some seconds in the next run
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        codes.save(part)
        part.replace(path)
    return codes


def _notes(codes: FractalCodes, least_filled: float) -> list[str]:
    """Why rendering is slow, if it is, and how many codes were drawn in vain."""
    slow, drawn = why_slow(), len(codes) + codes.refused
    refused = (
        f"{codes.refused:,} of {drawn:,} drawn codes diverged or filled less than {least_filled:.0%} of their image, "
        "so others were drawn"
    )
    return [*([slow] if slow else []), *([refused] if codes.refused else [])]


def _examples(images: FractalImages, labels: str) -> Examples:
    """The images with the targets that belong to their codes."""
    if labels == "none":
        return Examples(images, np.zeros((len(images), 0), np.uint8))
    sets, counts = images.code_sets(images.numbers)
    if labels == "one":
        return Examples(images, sets[:, 0])
    targets = np.zeros((len(images), len(images.codes)), np.uint8)
    used = np.arange(sets.shape[1]) < counts[:, None]
    targets[np.nonzero(used)[0], sets[used]] = 1
    return Examples(images, targets)


def _refuse_reversed(**ranges: tuple[float, float]) -> None:
    for name, (low, high) in ranges.items():
        if low > high:
            raise ConfigError(
                f"{name} is {[low, high]}, but the smaller number comes first",
                where=name,
                hint=f"set {name} = {[high, low]}",
            )
