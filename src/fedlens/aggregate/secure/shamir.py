"""Shamir's secret sharing of 32-byte secrets, over the prime 2^256 + 297 (Shamir 1979; ePrint 2017/281, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above all 32-byte secrets."""
SHARE_BYTES = 33  # a share has 257 bits
_COEFFICIENT_BYTES = 48  # reduced modulo the prime: within 2^-127 of uniform


def randomness(threshold: int) -> int:
    """The number of random bytes that `split` needs for this threshold."""
    return (threshold - 1) * _COEFFICIENT_BYTES


def coefficients(random: bytes, prime: int = PRIME) -> list[int]:
    """Coefficients of a polynomial, without the constant one, from `randomness(threshold)` random bytes."""
    starts = range(0, len(random), _COEFFICIENT_BYTES)
    return [int.from_bytes(random[at : at + _COEFFICIENT_BYTES]) % prime for at in starts]


def split(secret: int, more: Sequence[int], points: Sequence[int], prime: int = PRIME) -> list[int]:
    """The shares f(x) of a secret f(0) at some points, where f(x) = secret + more[0] x + more[1] x^2 + ... mod prime.

    Any len(more) + 1 shares give the secret; fewer say nothing about it if the coefficients are uniform. Raises
    `ValueError` for points that the prime does not have, and for fewer than the secret needs.

    >>> split(5, [3], points=[1, 2, 3], prime=11)
    [8, 0, 3]
    >>> combine({1: 8, 3: 3}, prime=11)
    5
    """
    if not (len(more) < len(points) and all(0 < x < prime for x in points)):
        raise ValueError(f"{len(points)} shares cannot be made with a threshold of {len(more) + 1}")
    values = []
    for x in points:
        value = 0
        for coefficient in reversed(more):
            value = (value + coefficient) * x % prime
        values.append((value + secret) % prime)
    return values


def weights(points: Sequence[int], prime: int = PRIME) -> list[int]:
    """Lagrange's weights at 0: f(0) = sum_i weights[i] f(points[i]) for a polynomial of fewer coefficients.

    Raises `ValueError` if a point is 0 or occurs twice modulo the prime.
    """
    if len({x % prime for x in points} | {0}) != len(points) + 1:
        raise ValueError("the points of shares must differ from each other and from 0")
    found = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        found.append(above * pow(below, -1, prime) % prime)
    return found


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """The secret of these shares, by their points. It is wrong if there are fewer than the threshold."""
    factors = weights(list(shares), prime)
    return sum(factor * share for factor, share in zip(factors, shares.values(), strict=True)) % prime
