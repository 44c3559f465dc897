"""Reads coordinates from columns, and finds their leaf cells of the S2 grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.partition.column_values import missing, numbers
from fedlens.data.table import Table

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
