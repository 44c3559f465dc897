"""Codes of fractals: iterated function systems, their numbers, and files of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError

FEWEST, MOST = 2, 8  # maps of a system
_FORMAT = 1  # of the files


@dataclass(frozen=True, eq=False)
class FractalCodes:
    """The codes of n iterated function systems.

    Map j of a system takes (x, y) to (a x + b y + e, c x + d y + f). The chaos game picks it with a probability
    proportional to |a d - b c| (chen2022, Eq. 6).

    Args:
        maps: float64 [n, 8, 6], the numbers a, b, c, d, e, f of each map; 0 beyond the last one of a system.
        counts: int64 [n], the number of maps of each system, 2 to 8.
        refused: how many drawn codes did not fulfil the conditions of their sampling.

    Raises `DataError` if shapes do not fit, or a number is not finite.

    >>> FractalCodes(np.zeros((3, 8, 6)), np.array([2, 3, 8])).take(np.array([2])).counts
    array([8])
    """

    maps: NDArray[np.float64]
    counts: NDArray[np.int64]
    refused: int = 0

    def __post_init__(self) -> None:
        n = len(self.counts)
        if self.maps.shape != (n, MOST, 6) or self.maps.dtype != np.float64:
            raise DataError(
                f"the maps are {self.maps.dtype} {list(self.maps.shape)}, but must be float64 [{n}, {MOST}, 6]"
            )
        if n and not (self.counts.min() >= 1 and self.counts.max() <= MOST):
            raise DataError(f"a code must have 1 to {MOST} maps")
        if not np.isfinite(self.maps).all():
            raise DataError("the maps contain numbers that are not finite")

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, rows: NDArray[Any]) -> FractalCodes:
        """The codes at the positions `rows`, int64 [k]."""
        return FractalCodes(self.maps[rows], self.counts[rows])

    @property
    def digest(self) -> str:
        """SHA-256 in hexadecimal of the numbers."""
        hashed = hashlib.sha256(self.counts.astype("<i8").tobytes())
        hashed.update(self.maps.astype("<f8").tobytes())
        return hashed.hexdigest()

    def save(self, path: Path) -> None:
        """Writes the codes to an .npz file."""
        with path.open("wb") as file:
            np.savez(
                file,
                format=np.int64(_FORMAT),
                maps=self.maps,
                counts=self.counts,
                refused=np.int64(self.refused),
            )

    @classmethod
    def load(cls, path: Path) -> FractalCodes:
        """Reads a file that `save` wrote. Raises `DataError` if it is missing or damaged."""
        try:
            # Opened here, because NumPy leaves a file open that is no archive.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                if int(file["format"]) != _FORMAT:
                    raise DataError(
                        f"the file has format {file['format']}, but must have {_FORMAT}", where=str(path)
                    )
                return cls(file["maps"], file["counts"], int(file["refused"]))
        except FileNotFoundError:
            raise DataError(
                "the file with the codes of the fractals does not exist", where=str(path)
            ) from None
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise DataError(
                f"no codes of fractals can be read: {error}",
                where=str(path),
                hint="write it with fedlens.data.fractals.codes.FractalCodes.save",
            ) from None


def singular_values(maps: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [..., 2]: the singular values of the linear parts of maps [..., 6], the larger one first.

    >>> singular_values(np.array([0.0, -0.5, 0.25, 0.0, 1.0, 1.0])).tolist()
    [0.5, 0.25]
    """
    a, b, c, d = (maps[..., k] for k in range(4))
    # Blinn's closed form for two by two: Q +- R with these two lengths.
    q, r = np.hypot(a + d, c - b) / 2, np.hypot(a - d, c + b) / 2
    return np.stack([q + r, np.abs(q - r)], axis=-1)


def thresholds(maps: NDArray[np.float64], counts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n, 8]: the chaos game picks map j if a 32-bit number is below entry j and not below the one before.

    Probabilities are proportional to |a d - b c|; a map of determinant 0 gets a thousandth of the largest, or it would
    never be picked. The last map of a system takes the rest.
    """
    weights = np.abs(maps[..., 0] * maps[..., 3] - maps[..., 1] * maps[..., 2])
    used = np.arange(maps.shape[1]) < np.asarray(counts)[:, None]
    floor = np.maximum(weights.max(axis=1, keepdims=True), 1e-12) / 1000
    weights = np.where(used, np.maximum(weights, floor), 0.0)
    shares = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    bounds: NDArray[np.int64] = np.floor(shares * 2.0**32).astype(np.int64)
    bounds[np.arange(maps.shape[1]) >= np.asarray(counts)[:, None] - 1] = 2**32
    return bounds
