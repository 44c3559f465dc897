"""How far frequencies are from those that are expected: Pearson's chi-squared, and where chance ends."""

from __future__ import annotations

from numpy.typing import NDArray


def chi_squared(counts: NDArray, expected: NDArray) -> float:
    """sum (observed - expected)^2 / expected."""
    return float(((counts - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """Above what one draw in about 10,000 is, by Wilson and Hilferty's approximation (3.72 deviations)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.72 * spread**0.5) ** 3
