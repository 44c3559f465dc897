"""Draws until a class is exhausted, one by one and in blocks."""

import numpy as np
import pytest

from fedlens.data.partition.by_class import draw_classes, owners_of_draws, shuffled_by_class


def test_examples_come_by_class_and_at_random_within() -> None:
    classes = np.array([2, 0, 2, 0, 2, 0] * 50)
    positions, counts = shuffled_by_class(classes, np.random.RandomState(0))
    assert counts.tolist() == [150, 0, 150]
    assert classes[positions].tolist() == [0] * 150 + [2] * 150
    assert sorted(positions.tolist()) == list(range(300))
    assert (np.diff(positions[:150]) < 0).sum() > 50


def test_each_draw_gets_an_example_of_its_class() -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 5, 400)
    taken = rng.permutation(400)[:300]
    clients = rng.integers(0, 7, 300)
    owners = owners_of_draws(classes, classes[taken], clients, np.random.RandomState(0))
    assert (owners >= 0).sum() == 300
    for client in range(7):
        held = np.bincount(classes[owners == client], minlength=5)
        assert held.tolist() == np.bincount(classes[taken[clients == client]], minlength=5).tolist()


def test_a_class_without_mass_is_not_drawn_even_at_the_edge() -> None:
    """The smallest random number is exactly 0, where the distribution function of an empty class is 0 too."""
    drawn = draw_classes(np.array([5, 5, 5]), np.zeros(3), lambda alive: np.array([0.0, 0.0, 1.0]))
    assert drawn.tolist() == [2, 2, 2]


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_draws_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 12, 6)
    p, uniform = rng.dirichlet(np.ones(6)), rng.random(start.sum())

    def distribution(alive: np.ndarray) -> np.ndarray:
        cumulative = np.cumsum(p[alive])
        return cumulative / cumulative[-1]

    left, expected = start.copy(), []
    for u in uniform:
        alive = np.flatnonzero(left)
        drawn = next(c for c, upto in zip(alive, distribution(alive), strict=True) if u < upto)
        left[drawn] -= 1
        expected.append(drawn)
    left = start.copy()
    assert draw_classes(left, uniform, distribution).tolist() == expected
    assert left.tolist() == [0] * 6
