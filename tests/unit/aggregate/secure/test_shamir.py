"""Shamir's shares: any t give the secret, and fewer say nothing."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import pytest

from fedlens.aggregate.secure import shamir


def test_any_t_shares_of_a_32_byte_secret_give_it() -> None:
    draw = random.Random(0)
    secret = int.from_bytes(draw.randbytes(32))
    more = shamir.coefficients(draw.randbytes(shamir.randomness(3)))
    shares = shamir.split(secret, more, points=range(1, 6))
    assert all(share.bit_length() <= 257 for share in shares)
    for points in combinations(range(1, 6), 3):
        assert shamir.combine({x: shares[x - 1] for x in points}) == secret
    assert shamir.combine({x: shares[x - 1] for x in (1, 2)}) != secret


def test_fewer_than_t_shares_leave_every_secret_equally_likely() -> None:
    prime = 5  # all polynomials of degree 2 can be listed
    for points in combinations(range(1, 5), 2):
        seen = Counter[tuple[int, ...]]()
        for secret, *more in product(range(prime), repeat=3):
            shares = shamir.split(secret, more, points=range(1, 5), prime=prime)
            seen[(secret, *(shares[x - 1] for x in points))] += 1
        assert len(seen) == prime**3
        assert set(seen.values()) == {1}


def test_the_modulus_is_prime_and_above_every_secret() -> None:
    # Miller and Rabin's test with 20 bases.
    odd, twos = shamir.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71):
        power = pow(base, odd, shamir.PRIME)
        powers = [power := power * power % shamir.PRIME for _ in range(twos - 1)]
        assert pow(base, odd, shamir.PRIME) == 1 or shamir.PRIME - 1 in [
            pow(base, odd, shamir.PRIME),
            *powers,
        ]
    assert shamir.PRIME > 2**256


def test_wrong_numbers_of_shares_and_points_are_refused() -> None:
    with pytest.raises(ValueError, match="2 shares cannot be made with a threshold of 3"):
        shamir.split(1, [1, 2], points=[1, 2])
    with pytest.raises(ValueError, match="differ from each other and from 0"):
        shamir.weights([1, 1])
    with pytest.raises(ValueError, match="differ from each other and from 0"):
        shamir.weights([1, shamir.PRIME])
