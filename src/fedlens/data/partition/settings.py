"""Settings that several partitioners have, each with its type, bounds and description."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field


def whole_path(path: str) -> str:
    """The absolute path, so that a run's config.toml finds the file from any directory."""
    return str(Path(path).expanduser().resolve())


WholePath = AfterValidator(whole_path)
"""For the annotation of a setting that names a file, beside its `Field`."""

PartyPaths = Annotated[tuple[Annotated[str, WholePath], ...], Field(min_length=2)]
"""The table of each party."""

Clients = Annotated[int, Field(ge=1, description="number of clients")]

Size = Annotated[
    int | None, Field(ge=1, description="examples per client; by default all examples are divided evenly")
]

# The laws of sizes: fedlens.data.partition.sizes.
Sigma = Annotated[
    float | None,
    Field(
        ge=0,
        allow_inf_nan=False,
        description="standard deviation of the logarithm of log-normal sizes; by default 1",
    ),
]
Exponent = Annotated[
    float | None,
    Field(ge=0, allow_inf_nan=False, description="power-law sizes: size ~ rank^(-exponent); by default 1"),
]

# Classes by proportions p_c ~ Dir(alpha 1) over the clients.
Alpha = Annotated[
    float, Field(ge=0, description="concentration: 0 gives each class to one client, inf gives even shares")
]
Redraws = Annotated[
    int, Field(ge=0, description="number of draws to reach the minimum before examples are moved")
]
Balance = Annotated[
    bool,
    Field(description="a client that already has its even share of examples gets none of the next classes"),
]

_GRIDS = {"quadrants": (2, 2), "halves": (1, 2)}


def grid_of(split: str) -> tuple[int, int]:
    """How many windows a split of images has from top to bottom, and from left to right.

    Args:
        split: "quadrants", "halves" (left and right), "rows:K" or "columns:K".

    >>> grid_of("quadrants"), grid_of("halves"), grid_of("rows:3")
    ((2, 2), (1, 2), (3, 1))
    """
    if split in _GRIDS:
        return _GRIDS[split]
    kind, _, number = split.partition(":")
    return (int(number), 1) if kind == "rows" else (1, int(number))
