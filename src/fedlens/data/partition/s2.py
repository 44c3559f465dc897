"""One client per place: cells of the sphere, split until none has too many examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.table import Table, missing, numbers

LEAF_LEVEL = 30


@partitioner
def s2(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    n_max: Annotated[int, Field(ge=1, description="cells with more examples are split into four")],
    n_min: Annotated[
        int | None,
        Field(ge=1, description="cells with fewer examples are dropped; by default 0.01 n_max, rounded up"),
    ] = None,
    lat: Annotated[str, Field(description="the column of the latitude, degrees")] = "lat",
    lon: Annotated[str, Field(description="the column of the longitude, degrees")] = "lon",
    missing: Annotated[
        Literal["stop", "skip"],
        Field(description="examples without valid coordinates: 'stop' is an error, 'skip' leaves them out"),
    ] = "stop",
) -> Partition:
    """One client for each S2 cell, from an adaptive subdivision of the sphere (hsu2020 section 4.1).

    It starts with the six faces of level 0. Every cell with more than `n_max` examples is split into its four
    children, down to the leaves (level 30, about 1 cm): only a leaf may hold more than `n_max`. Then cells with fewer
    than `n_min` examples are dropped. hsu2020 takes n_max in {100, 1k, 3k, 30k} and n_min = 0.01 n_max.

    The ids are the tokens of the cells, in the order of their 64-bit ids. Discarded: the examples of cells below
    `n_min`, and with `missing` = "skip" those whose coordinates are missing, no numbers, or off the sphere
    (|lat| > 90 or |lon| > 180). Both are counted in the partition's `spec`, as "dropped" and "skipped". Nothing
    is random: the seed changes nothing.

    Raises `ConfigError` if a column does not exist, n_min is above n_max, no cell has enough examples, or the library
    s2cell is not installed; `DataError` if coordinates are invalid and `missing` is "stop".

    >>> places = {"lat": [52.5, 52.5, 48.1, -33.9], "lon": [13.4, 13.4, 11.6, 151.2]}
    >>> p = s2(Table.of([0, 1, 0, 1], places), 0, n_max=2)
    >>> p.ids, [row.tolist() for row in p]
    (('479', '47b', '7'), [[2], [0, 1], [3]])
    """
    table = Table.of(labels)
    streams(seed, 1)
    least = -(-n_max // 100) if n_min is None else n_min
    if least > n_max:
        raise ConfigError(
            f"n_min is {least}, but cells have at most n_max = {n_max} examples",
            where="n_min",
            hint="use the default, 0.01 n_max",
        )
    latitude, longitude, usable = read_places(table, lat, lon, skip=missing == "skip")
    cells = np.zeros(len(table), np.uint64)
    cells[usable] = split(leaf_cells(latitude, longitude), n_max)
    kept, owners, sizes = np.unique(cells[usable], return_inverse=True, return_counts=True)
    large = sizes >= least
    if not large.any():
        raise ConfigError(
            f"none of the {len(kept)} cells has {least} examples or more",
            where="n_min",
            hint=f"take an n_min of at most {sizes.max(initial=0)}, or a larger n_max",
        )
    number = np.where(large, np.cumsum(large) - 1, -1)
    owner = np.full(len(table), -1, np.int64)
    owner[usable] = number[owners]
    dropped = {"cells": int((~large).sum()), "examples": int(sizes[~large].sum())}
    spec = {"n_min": least, "dropped": dropped, "skipped": len(table) - len(usable)}
    return Partition.of_owners(owner, [token(cell) for cell in kept[large].tolist()], spec=spec)


def split(leaves: NDArray[np.uint64], n_max: int) -> NDArray[np.uint64]:
    """uint64 [n]: the id of the cell of each leaf after the splits.

    An S2 id has three bits for the face, two bits for each level (one of the four children, along the Hilbert curve),
    and a final 1. So a cell of level l is a shared prefix of 3 + 2 l bits, and a run of the sorted leaves. There is
    one pass per level, and runs that are small enough are done.

    >>> leaves = np.array([0x1000000000000001, 0x1000000000000003, 0x5000000000000001], np.uint64)
    >>> [hex(cell) for cell in split(leaves, 1)]
    ['0x1000000000000001', '0x1000000000000003', '0x5000000000000000']
    """
    order = np.argsort(leaves, kind="stable")
    todo, ids = order, leaves[order]
    cells = np.empty_like(leaves)
    for level in range(LEAF_LEVEL + 1):
        prefixes = ids >> np.uint64(61 - 2 * level)
        starts = np.flatnonzero(np.concatenate([[True], prefixes[1:] != prefixes[:-1]]))
        sizes = np.diff(starts, append=len(prefixes))
        done = np.repeat((sizes <= n_max) | (level == LEAF_LEVEL), sizes)
        ends = np.uint64(1 << (60 - 2 * level))
        cells[todo[done]] = (prefixes[done] << np.uint64(61 - 2 * level)) | ends
        todo, ids = todo[~done], ids[~done]
        if not len(todo):
            break
    return cells


_BORDER = 12  # points along a side of a cell


def read_places(
    table: Table, lat: str, lon: str, *, skip: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """(latitudes [m], longitudes [m], their rows [m]), in degrees.

    With `skip`, rows without valid coordinates are left out.

    Raises `DataError` that counts and names them otherwise, or if no row is left; `ConfigError` on the setting "lat"
    or "lon" if there is no such column.
    """
    given = table.column(lat, "lat"), table.column(lon, "lon")
    latitude, longitude = numbers(given[0]), numbers(given[1])
    absent = missing(given[0]) | missing(given[1])
    text = ~absent & (np.isnan(latitude) | np.isnan(longitude))
    outside = ~absent & ~text & ~((np.abs(latitude) <= 90) & (np.abs(longitude) <= 180))
    bad = absent | text | outside
    usable = np.flatnonzero(~bad)
    if len(usable) and (skip or not bad.any()):
        return latitude[usable], longitude[usable], usable
    kinds = ((absent, "missing"), (text, "not numbers"), (outside, "outside the sphere"))
    found = " and ".join(f"{int(rows.sum())} {name}" for rows, name in kinds if rows.any())
    first = int(bad.argmax()) if bad.any() else 0
    what = f"the coordinates of {int(bad.sum())} of {len(table)} examples are not valid coordinates ({found})"
    if bad.any():
        pair = f"{given[0][first]}, {given[1][first]}"
        what += f"; the first is example {table.where()[first]} with '{lat}', '{lon}' = {pair}"
    raise DataError(
        what if len(table) else "there are no examples",
        where=table.dataset or None,
        hint="latitudes are -90 to 90 and longitudes -180 to 180, in degrees"
        + ("; set missing = 'skip' to leave these examples out" if len(usable) else ""),
    )


def leaf_cells(latitude: NDArray[np.float64], longitude: NDArray[np.float64]) -> NDArray[np.uint64]:
    """uint64 [n]: the id of the leaf cell (level 30) of each coordinate; equal coordinates are converted once.

    Raises `ConfigError` if the library s2cell is not installed.
    """
    convert = _library().lat_lon_to_cell_id
    order = np.lexsort((longitude, latitude))
    ordered = latitude[order], longitude[order]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(ordered[0]) != 0) | (np.diff(ordered[1]) != 0)
    pairs = zip(ordered[0][new].tolist(), ordered[1][new].tolist(), strict=True)
    ids = np.fromiter((convert(*pair) for pair in pairs), np.uint64, int(new.sum()))
    leaves = np.empty(len(order), np.uint64)
    leaves[order] = ids[np.cumsum(new) - 1]
    return leaves


def token(cell: int) -> str:
    """The usual short text of a cell id: 16 hexadecimal digits without the zeros at the end.

    >>> token(0x89C2594000000000)
    '89c2594'
    """
    return f"{cell:016x}".rstrip("0")


def cell_borders(tokens: Sequence[str]) -> tuple[list[float], list[float | None]]:
    """(longitudes, latitudes) along the borders of cells, in degrees, with a gap (None) after each cell.

    Lines that cross the 180th meridian have a gap there. Raises `ConfigError` if s2cell is not installed.

    >>> x, y = cell_borders(["1"])  # the face around latitude 0 and longitude 0
    >>> round(min(x)), round(max(x)), y[-1]
    (-45, 45, None)
    """
    library = _library()
    along, zero, one = np.arange(_BORDER) / _BORDER, np.zeros(_BORDER), np.ones(_BORDER)
    across = (
        np.concatenate([along, one, 1 - along, zero, [0]]),
        np.concatenate([zero, along, one, 1 - along, [0]]),
    )
    x, y = list[float](), list[float | None]()
    for name in tokens:
        cell = int(name.ljust(16, "0"), 16)
        size = 1 << ((cell & -cell).bit_length() // 2)  # of the cell, in leaf cells
        face, *leaf = library.s2_cell_id_to_face_ij(cell)
        # Both coordinates of a face run from 0 to 1; the projection is quadratic, as in the S2 library.
        s, t = ((at // size + part) * size / 2**30 for at, part in zip(leaf, across, strict=True))
        u, v = (np.where(p >= 0.5, 4 * p**2 - 1, 1 - 4 * (1 - p) ** 2) / 3 for p in (s, t))
        w = np.ones_like(u)
        faces = ((w, u, v), (-u, w, v), (-u, -v, w), (-w, -v, -u), (v, -w, -u), (v, u, -w))
        east, north, up = faces[face]
        longitude, latitude = (
            np.degrees(np.arctan2(north, east)),
            np.degrees(np.arctan2(up, np.hypot(east, north))),
        )
        jumps = np.append(np.flatnonzero(np.abs(np.diff(longitude)) > 180) + 1, len(longitude))
        x += np.insert(longitude, jumps, longitude[jumps - 1]).round(4).tolist()
        y += [None if np.isnan(at) else at for at in np.insert(latitude, jumps, np.nan).round(4).tolist()]
    return x, y


def _library() -> Any:
    try:
        import s2cell
    except ImportError:
        raise ConfigError(
            "the partition s2 needs the library s2cell, which is not installed",
            hint="pip install 'fedlens[geo]'",
        ) from None
    return s2cell
