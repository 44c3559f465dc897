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

Clients = Annotated[int, Field(ge=1, description="number of clients")]

Size = Annotated[
    int | None, Field(ge=1, description="examples a client gets; by default as many as there are for all")
]

# The laws of sizes: fedlens.data.partition.sizes.
Sigma = Annotated[
    float | None, Field(ge=0, allow_inf_nan=False, description="spread of log-normal sizes; 1 if not given")
]
Exponent = Annotated[
    float | None,
    Field(
        ge=0, allow_inf_nan=False, description="size ~ rank^(-exponent) of power-law sizes; 1 if not given"
    ),
]

# Classes by proportions p_c ~ Dir(alpha 1) over the clients.
Alpha = Annotated[
    float, Field(ge=0, description="concentration: 0 is all of a class to one client, inf is even shares")
]
Redraws = Annotated[
    int, Field(ge=0, description="how often to draw again for the minimum before examples are moved")
]
Balance = Annotated[
    bool, Field(description="a client that has its even share already gets no more of the next classes")
]
