"""Whatever the labels, the settings and the seed: what has to be true of every partition."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.base.errors import ConfigError
from fedlens.data.federated import hold_out
from fedlens.data.partition.dirichlet import dirichlet
from fedlens.data.partition.iid import iid
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.shards import shards

Recipe = Callable[[np.ndarray, int], Partition]

LABELS = st.builds(
    lambda counts, seed: np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts)),
    st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0),
    st.integers(0, 100),
)
SEED = st.integers(0, 2**63)
CLIENTS = st.integers(1, 25)
ALPHA = st.one_of(
    st.just(0.0), st.just(float("inf")), st.floats(1e-9, 1e9), st.floats(0, None, allow_infinity=True)
)


def shards_of(
    labels: np.ndarray, clients: int, each: int, scheme: Literal["distinct", "mcmahan"], seed: int
) -> Partition:
    """Shards with at most so many clients and classes for each as the labels allow."""
    counts = np.bincount(labels)
    each = min(each, int((counts > 0).sum()))
    fits = {
        "distinct": lambda k: np.minimum(counts, k).sum() >= k * each,
        "mcmahan": lambda k: k * each <= len(labels),
    }[scheme]
    most = max(k for k in range(1, clients + 1) if fits(k))
    return shards(labels, seed, clients=most, classes_per_client=each, scheme=scheme)


# Valid by construction: settings that the labels do not allow are lowered. That they are refused is tested below.
RECIPES = st.one_of(
    st.builds(lambda k: lambda y, s: iid(y, s, clients=min(k, len(y))), CLIENTS),
    st.builds(
        lambda k, c, scheme: lambda y, s: shards_of(y, k, c, scheme, s),
        CLIENTS,
        st.integers(1, 4),
        st.sampled_from(["distinct", "mcmahan"]),
    ),
    st.builds(
        lambda k, alpha, prior: (
            lambda y, s: dirichlet(y, s, clients=min(k, len(y)), alpha=alpha, prior=prior)
        ),
        CLIENTS,
        ALPHA,
        st.sampled_from(["uniform", "data"]),
    ),
)


@settings(deadline=None, max_examples=150)
@given(RECIPES, LABELS, SEED)
def test_parts_are_disjoint_in_range_in_order_and_repeatable(
    recipe: Recipe, labels: np.ndarray, seed: int
) -> None:
    p = recipe(labels, seed)
    assert len(np.unique(p.indices)) == len(p.indices)
    assert p.indices.min() >= 0
    assert p.indices.max() < len(labels)
    assert all((np.diff(row) > 0).all() for row in p)
    assert recipe(labels, seed).digest == p.digest


@settings(deadline=None, max_examples=100)
@given(LABELS, CLIENTS, SEED)
def test_iid_loses_nothing_and_sizes_differ_by_one(labels: np.ndarray, clients: int, seed: int) -> None:
    clients = min(clients, len(labels))
    p = iid(labels, seed, clients=clients)
    assert len(p.indices) == len(labels)
    assert np.ptp(p.sizes()) <= 1


@settings(deadline=None, max_examples=150)
@given(LABELS, CLIENTS, ALPHA, SEED)
def test_dirichlet_clients_are_equal_and_as_large_as_possible(
    labels: np.ndarray, clients: int, alpha: float, seed: int
) -> None:
    clients = min(clients, len(labels))
    p = dirichlet(labels, seed, clients=clients, alpha=alpha)
    assert (p.sizes() == len(labels) // clients).all()


@settings(deadline=None, max_examples=150)
@given(LABELS, CLIENTS, st.integers(1, 4), SEED)
def test_mcmahan_shards_are_equal_and_only_the_remainder_is_lost(
    labels: np.ndarray, clients: int, each: int, seed: int
) -> None:
    each = min(each, len(labels))
    clients = min(clients, len(labels) // each)
    p = shards(labels, seed, clients=clients, classes_per_client=each, scheme="mcmahan")
    assert (p.sizes() == each * (len(labels) // (clients * each))).all()
    assert len(labels) - len(p.indices) < clients * each


@settings(deadline=None, max_examples=300)
@given(LABELS, CLIENTS, st.integers(1, 4), SEED)
def test_distinct_shards_are_dealt_whenever_it_is_possible(
    labels: np.ndarray, clients: int, each: int, seed: int
) -> None:
    """And never otherwise; every client has `each` classes, as many examples of each as can be."""
    counts = np.bincount(labels)

    def possible(size: int) -> bool:
        return bool(np.minimum(counts // size, clients).sum() >= clients * each)

    if not possible(1):
        try:
            shards(labels, seed, clients=clients, classes_per_client=each)
        except ConfigError:
            return
        raise AssertionError("it dealt what does not exist")
    held = shards(labels, seed, clients=clients, classes_per_client=each).class_counts(labels)
    assert ((held > 0).sum(axis=1) == each).all()
    (size,) = np.unique(held[held > 0])
    assert possible(size)
    assert not possible(size + 1)


@settings(deadline=None, max_examples=60)
@given(LABELS, st.integers(1, 25), ALPHA, SEED)
def test_more_clients_than_examples_are_refused(
    labels: np.ndarray, more: int, alpha: float, seed: int
) -> None:
    clients = len(labels) + more
    for refused in (
        lambda: iid(labels, seed, clients=clients),
        lambda: shards(labels, seed, clients=clients, classes_per_client=1, scheme="mcmahan"),
        lambda: dirichlet(labels, seed, clients=clients, alpha=alpha),
    ):
        with pytest.raises(ConfigError):
            refused()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**40), st.integers(1, 50))
def test_another_seed_gives_another_partition(seed: int, step: int) -> None:
    labels = np.arange(300) % 10
    for recipe in (
        lambda s: iid(labels, s, clients=10),
        lambda s: shards(labels, s, clients=10),
        lambda s: shards(labels, s, clients=10, scheme="mcmahan"),
        lambda s: dirichlet(labels, s, clients=10, alpha=0.1),
    ):
        assert recipe(seed).digest != recipe(seed + step).digest


@settings(deadline=None, max_examples=80)
@given(RECIPES, LABELS, SEED)
def test_counts_and_distances_add_up(recipe: Recipe, labels: np.ndarray, seed: int) -> None:
    p = recipe(labels, seed)
    counts = p.class_counts(labels)
    np.testing.assert_array_equal(counts.sum(axis=1), p.sizes())
    np.testing.assert_array_equal(
        counts.sum(axis=0), np.bincount(labels[p.indices], minlength=counts.shape[1])
    )
    distances = p.client_emds(labels)
    assert (distances >= 0).all()
    assert (distances <= 2 + 1e-12).all()
    shares = counts / p.sizes()[:, None]
    population = sum(n / len(p.indices) * q for n, q in zip(p.sizes(), shares, strict=True))
    literal = sum(
        n / len(p.indices) * np.abs(q - population).sum() for n, q in zip(p.sizes(), shares, strict=True)
    )
    assert abs(p.emd(labels) - literal) < 1e-9


@settings(deadline=None, max_examples=40)
@given(RECIPES, LABELS, SEED, st.text(max_size=10))
def test_saving_and_loading_changes_nothing(recipe: Recipe, labels: np.ndarray, seed: int, name: str) -> None:
    p = recipe(labels, seed)
    p = Partition(p.ids, p.indices, p.offsets, p.spec, name.encode("utf-8", "ignore").decode())
    with tempfile.TemporaryDirectory() as folder:
        p.save(Path(folder) / "p.npz")
        q = Partition.load(Path(folder) / "p.npz")
    assert (q.digest, q.ids, q.spec, q.dataset) == (p.digest, p.ids, p.spec, p.dataset)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 500), st.floats(0, 0.5), SEED)
def test_holding_out_splits_everything_in_two(examples: int, share: float, seed: int) -> None:
    kept, held = hold_out(examples, share, seed)
    assert sorted([*kept, *held]) == list(range(examples))
    assert len(kept) > 0
    assert (len(held) > 0) == (share > 0)
