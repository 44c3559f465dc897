"""Arithmetic modulo the prime 2^31 - 1: exact matrix products, Lagrange matrices, and uniform words from a key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError

Residues: TypeAlias = NDArray[np.uint32]  # each in [0, q)

Q = 2**31 - 1
"""The prime. Every function also takes a smaller one, so that a test can enumerate all that may happen."""
TERMS = 128  # products of 30 and 16 bits in an exact sum: 129 pass 2^53, where float64 has no odd numbers
_HALF = 16
_CACHED = 1 << 17  # numbers that are worked on at once, so that they stay in the cache of a core


def check_range(cohort: int, bits: int) -> None:
    """Raises `ConfigError` if the sum of a cohort's words of so many bits may reach q / 2: cohort x 2^bits < q / 2."""
    if 2 * (cohort << bits) >= Q:
        raise ConfigError(
            f"a sum of {cohort:,} clients at {bits} bits may be {cohort:,} x 2^{bits}, and words modulo 2^31 - 1 hold "
            "less than 2^30",
            where="aggregate.bits",
            hint=f"set aggregate.bits = {((Q - 1) // (2 * cohort)).bit_length() - 1} or less, or select fewer clients",
        )


def residues(numbers: NDArray[np.signedinteger], q: int = Q) -> Residues:
    """Whole numbers modulo q.

    >>> residues(np.array([-1, 0, 3], np.int32))
    array([2147483646,          0,          3], dtype=uint32)
    """
    found: Residues = np.remainder(numbers, q).astype(np.uint32)
    return found


def numbers(values: Residues, q: int = Q) -> NDArray[np.int32]:
    """The whole numbers in [-q/2, q/2] that these residues stand for; undoes `residues` for such numbers.

    >>> numbers(residues(np.array([-1, 0, 3])))
    array([-1,  0,  3], dtype=int32)
    """
    return np.where(values > q // 2, values - np.uint32(q), values).view(np.int32)


def add(one: Residues, other: Residues, q: int = Q) -> Residues:
    """one + other mod q.

    >>> add(np.array([5], np.uint32), np.array([3], np.uint32), q=7)
    array([1], dtype=uint32)
    """
    total = one + other  # below 2^32
    found: Residues = np.minimum(total, total - np.uint32(q))  # what is below q wraps to a larger word
    return found


def negative(values: Residues, q: int = Q) -> Residues:
    """-values mod q.

    >>> negative(np.array([0, 3], np.uint32), q=7)
    array([0, 4], dtype=uint32)
    """
    return np.where(values == 0, values, np.uint32(q) - values)


def uniform(key: bytes, count: int, q: int = Q) -> Residues:
    """Residues [count] from AES-256-CTR under a key, each of the q equally likely: others are drawn again.

    A key is used once.

    >>> uniform(bytes(32), 3)
    array([2025887196,  159989922,  346179757], dtype=uint32)
    """
    # Here, because only secure sums need the package.
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def draw(count: int) -> Residues:
        words = np.frombuffer(stream.update(bytes(4 * count)), "<u4") & np.uint32((1 << q.bit_length()) - 1)
        return words.astype(np.uint32, copy=False)

    values = draw(count)
    while len(others := np.flatnonzero(values >= q)):
        values[others] = draw(len(others))
    return values


@lru_cache(maxsize=32)  # all clients of a round have the same
def lagrange(at: tuple[int, ...], points: tuple[int, ...], q: int = Q) -> tuple[tuple[int, ...], ...]:
    """The matrix L with f(at[i]) = sum_j L[i][j] f(points[j]) mod q, for polynomials of fewer than len(points) terms.

    L[i][j] = prod over k != j of (at[i] - points[k]) / (points[j] - points[k]). Every square part of it has an inverse
    if no point occurs in both lists.

    Raises `ValueError` if two points of one list are equal modulo q, or if a point occurs in both.

    >>> lagrange((3, 4), (1, 2), q=7)  # f(3) = 2 f(2) - f(1), f(4) = 3 f(2) - 2 f(1)
    ((6, 2), (5, 3))
    """
    if len({x % q for x in (*at, *points)}) != len(at) + len(points):
        raise ValueError("the points of a code must all differ")
    factors = []
    for j, point in enumerate(points):
        below = 1
        for k, other in enumerate(points):
            below = below * (point - other) % q if k != j else below
        factors.append(pow(below, -1, q))
    rows = []
    for x in at:
        above = 1
        for point in points:
            above = above * (x - point) % q
        rows.append(tuple(above * pow(x - p, -1, q) * f % q for p, f in zip(points, factors, strict=True)))
    return tuple(rows)


def product(matrix: Sequence[Sequence[int]], values: Iterable[Residues], q: int = Q) -> Residues:
    """The matrix product modulo q, exact: [rows, terms] times `terms` rows of [n].

    The values are taken in halves of 16 bits, and the matrix between -q/2 and q/2, so that float64 holds sums of
    `TERMS` products: with v = h 2^16 + l the product is [2^16 M, M] [h; l].

    >>> product([[1, 2], [6, 6]], np.array([[3, 4], [5, 6]], np.uint32), q=7)
    array([[6, 2],
           [6, 4]], dtype=uint32)
    """
    given, low = list(values), np.array(matrix, np.int64)
    (rows, terms), count = low.shape, len(given[0])
    both = (np.concatenate([low << _HALF, low], axis=1) + q // 2) % q - float(q // 2)
    out = np.empty((rows, count), np.uint32)
    columns = max(1, min(count, _CACHED // (rows + terms)))
    memory = [np.empty((height, columns)) for height in (2 * terms, rows, rows)]
    copied = np.empty(terms * columns, np.uint32)
    for start in range(0, count, columns):
        found = out[:, start : start + columns]
        halves, total, more = (each[:, : found.shape[1]] for each in memory)
        part = copied[: terms * found.shape[1]]
        np.concatenate([row[start : start + columns] for row in given], out=part)
        part = part.view(np.int32).reshape(terms, -1)
        np.right_shift(part, _HALF, out=halves[:terms], casting="unsafe")
        np.bitwise_and(part, 0xFFFF, out=halves[terms:], casting="unsafe")
        for first in range(0, 2 * terms, TERMS):
            group = slice(first, first + TERMS)
            np.matmul(both[:, group], halves[group], out=more if first else total)
            if first:
                total += more
            # Exact for |total| < 2^53: 1 / Q is 2^-31 + 2^-62 in float64, so k Q gives k, and k Q - 1 gives less, as
            # numbers below 2^22 are 2^-31 apart or closer. Of other primes 103 times 1 / 103 is less than 1.
            np.multiply(total, 1 / q, out=more) if q == Q else np.divide(total, q, out=more)
            total -= np.multiply(np.floor(more, out=more), q, out=more)
        np.copyto(found.view(np.int32), total, casting="unsafe")
    return out
