"""Arithmetic modulo 2^31 - 1: exact at its limits, and uniform."""

from __future__ import annotations

from collections import Counter
from itertools import product as pairs
from typing import Any

import numpy as np
import pytest

from fedlens.aggregate.secure import field
from fedlens.aggregate.secure.field import TERMS, Q, lagrange, product, residues, uniform


def exact(matrix: Any, values: Any) -> Any:
    return (np.array(matrix, object) @ np.array(values, object) % Q).astype(np.uint32)


@pytest.mark.parametrize("terms", [1, 31, 64, 65, 100, 129, 200])
def test_a_product_is_that_of_whole_numbers(terms: int) -> None:
    """Also where all numbers are the largest: -1, both ends of [-q/2, q/2], and their products with 2^16."""
    draw = np.random.default_rng(terms)
    most = [Q - 1, Q // 2, Q // 2 + 1, *(x * pow(2**16, -1, Q) % Q for x in (Q // 2, Q // 2 + 1))]
    matrix = np.array([*draw.integers(0, Q, (3, terms)), *np.repeat(most, terms).reshape(-1, terms)])
    for values in (
        draw.integers(0, Q, (terms, 200)),
        *(np.full((terms, 3), value) for value in (Q - 1, Q - 2**16, 2**16 - 1)),
    ):
        assert np.array_equal(product(matrix, values.astype(np.uint32)), exact(matrix, values))


def test_vectors_longer_than_the_cache_are_whole() -> None:
    values = uniform(bytes(32), 3 * 70_000).reshape(3, -1)
    assert np.array_equal(product([[5, 6, Q - 1]], values), exact([[5, 6, Q - 1]], values))


@pytest.mark.parametrize("largest", [Q // 2, Q // 2 + 1])  # (q - 1) / 2, and -(q - 1) / 2
def test_sums_of_128_products_are_exact_and_those_of_131_are_not(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """131 products of 2^30 - 1 and 2^16 - 1 are more than 2^53, and odd."""
    most = (Q // 2) * (2**16 - 1)
    assert TERMS * most + Q < 2**53 < (TERMS + 1) * most  # a residue is added
    matrix = [[0] * 61 + [largest] * 131]  # its low halves are columns 253 to 383: they fill the third group
    values = np.full((192, 5), 2**16 - 1, np.uint32)
    assert np.array_equal(product(matrix, values), exact(matrix, values))
    monkeypatch.setattr(field, "TERMS", 2 * 192)
    assert not np.array_equal(product(matrix, values), exact(matrix, values))


def test_quotients_that_are_nearly_whole_are_rounded_down_to_the_right_number() -> None:
    """A sum of k q, k q + 1 and k q - 1 with k near 2^22, of both signs; and all small sums modulo small primes."""
    values = np.full((128, 1), 2**16 - 1, np.uint32)
    for factor in (1, Q // 2, Q // 2 + 1):
        total = int(exact([[factor] * 128], values)[0, 0])
        for wanted in (0, 1, Q - 1):
            last = np.array([[(wanted - total) % Q]], np.uint32)
            both = np.concatenate([values, last])
            assert product([[factor] * 128 + [1]], both).tolist() == [[wanted]]
    for q in (3, 5, 7, 31):
        all_values = np.arange(q, dtype=np.uint32)[None].repeat(40, axis=0)
        for factor in range(q):
            wanted = [40 * factor * value % q for value in range(q)]
            assert product([[factor] * 40], all_values, q)[0].tolist() == wanted


@pytest.mark.parametrize("q", [7, Q])
def test_a_polynomial_goes_through_its_other_points(q: int) -> None:
    coefficients = (3, 1, 4)

    def at(x: int) -> int:
        return sum(c * x**power for power, c in enumerate(coefficients)) % q

    values = np.array([[at(x)] for x in (1, 2, 6)], np.uint32)
    assert product(lagrange((3, 4), (1, 2, 6), q), values, q)[:, 0].tolist() == [at(3), at(4)]


@pytest.mark.parametrize(("at", "points"), [((3, 10), (1, 2)), ((3,), (1, 8)), ((8,), (1, 2))])
def test_points_that_are_equal_are_refused(at: tuple[int, ...], points: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must all differ"):
        lagrange(at, points, q=7)


@pytest.mark.parametrize("q", [7, 103, 107, 197, 65_521, Q])
def test_a_multiple_of_the_prime_is_zero(q: int) -> None:
    # In float64, 103 times 1 / 103 is less than 1.
    values = np.random.default_rng(0).integers(0, q, 1_000)
    both = [values.astype(np.uint32), ((q - values) % q).astype(np.uint32)]
    assert not product([[1, 1]], both, q=q).any()


@pytest.mark.parametrize("q", [7, 31, Q])
def test_sums_and_signs(q: int) -> None:
    some = [0, 1, 2, q // 2, q // 2 + 1, q - 2, q - 1]
    for one, other in pairs(some, some):
        given = np.array([one], np.uint32), np.array([other], np.uint32)
        assert field.add(*given, q=q).tolist() == [(one + other) % q]
    values = np.array(some, np.uint32)
    assert field.add(values, field.negative(values, q), q).tolist() == [0] * len(some)
    signed = np.array([-(q // 2), -1, 0, 1, q // 2])
    assert field.numbers(residues(signed, q), q).tolist() == signed.tolist()


def test_each_residue_is_equally_likely() -> None:
    stats = pytest.importorskip("scipy.stats")
    counts = Counter(uniform(bytes(32), 70_000, q=5).tolist())
    assert sorted(counts) == list(range(5))
    assert stats.chisquare(list(counts.values())).pvalue > 0.01
    words = uniform(b"k" * 32, 100_000)
    assert words.max() < Q
    assert stats.chisquare(np.bincount(words >> 23, minlength=256)).pvalue > 0.01
    assert not np.array_equal(words, uniform(b"l" * 32, 100_000))
