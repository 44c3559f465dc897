"""Whatever the examples, the settings and the seed: partitions by size, by class, by place and by nature."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.partition.dirichlet_classwise import dirichlet_classwise
from fedlens.data.partition.iid import iid
from fedlens.data.partition.natural import natural
from fedlens.data.partition.pachinko import pachinko
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.quantity import quantity
from fedlens.data.partition.s2 import s2
from fedlens.data.partition.sizes import draw_sizes
from fedlens.data.table import Table

s2cell = pytest.importorskip("s2cell")
Recipe = Callable[[Table, int], Partition]

SEED = st.integers(0, 2**63)
CLIENTS = st.integers(1, 25)
MINIMUM = st.integers(1, 4)
CONCENTRATION = st.one_of(
    st.just(0.0), st.just(float("inf")), st.floats(1e-9, 1e9), st.floats(0, None, allow_infinity=True)
)
SPREAD = st.one_of(st.floats(0, 3), st.floats(0, None, allow_infinity=False))


def make_table(counts: list[int], places: int, users: int, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    where = np.stack([rng.uniform(-90, 90, places), rng.uniform(-180, 180, places)], axis=1)
    where = where[rng.geometric(0.2, len(labels)) % places] + 0.01 * rng.normal(0, 1, (len(labels), 2)).round(
        1
    )
    columns = {
        "lat": where[:, 0].clip(-90, 90),
        "lon": where[:, 1].clip(-180, 180),
        "client": np.array([f"u{i}" for i in rng.geometric(1 / users, len(labels))]),
    }
    return Table.of(labels, columns, coarse=rng.integers(0, 3, int(labels.max()) + 1))


TABLES = st.builds(
    make_table,
    st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 100),
)
LAWS = st.one_of(
    st.builds(lambda x: {"sizes": "log-normal", "sigma": x}, SPREAD),
    st.builds(lambda x: {"sizes": "power-law", "exponent": x}, SPREAD),
)
QUANTITY_LAWS = LAWS | st.builds(lambda x: {"sizes": "dirichlet", "alpha": x}, CONCENTRATION)

# Valid by construction: settings that the table does not allow are lowered. That they are refused is tested below.


def fitted(clients: int, minimum: int, table: Table) -> dict[str, int]:
    """The clients and their minimum, lowered to what the examples allow."""
    minimum = min(minimum, len(table))
    return {"clients": min(clients, len(table) // minimum), "minimum": minimum}


def given_sizes(table: Table, seed: int, sizes: list[int]) -> Partition:
    """As many of the sizes as there are examples for; the first is lowered if it is too large by itself."""
    sizes = [min(sizes[0], len(table)), *sizes[1:]]
    sizes = [size for size, total in zip(sizes, np.cumsum(sizes), strict=True) if total <= len(table)]
    return iid(table, seed, clients=len(sizes), sizes=sizes)


def users_of(table: Table, min_examples: int, min_classes: int) -> list[str]:
    """The users with so many examples of so many classes."""
    users = table.column("client")
    return [
        name
        for name in np.unique(users).tolist()
        if (users == name).sum() >= min_examples
        and len(np.unique(table.labels[users == name])) >= min_classes
    ]


def natural_of(table: Table, seed: int, examples: int, classes: int, most: int | None) -> Partition:
    """Lowers what is asked of a user until there are two; where the table has one user, it is one client."""
    if len(users_of(table, 1, 0)) < 2:
        return iid(table, seed, clients=1)
    while len(users_of(table, examples, classes)) < 2:
        examples, classes = max(1, examples - 1), max(0, classes - 1)
    return natural(table, seed, min_examples=examples, min_classes=classes, max_clients=most)


def cells_of(table: Table, seed: int, n_max: int, n_min: int | None) -> Partition:
    """Lowers the least size of a cell until there is such a cell."""
    sizes = s2(table, seed, n_max=n_max, n_min=1).sizes()
    return s2(table, seed, n_max=n_max, n_min=n_min and min(n_min, n_max, int(sizes.max())))


IID = st.builds(lambda k, m, law: lambda t, s: iid(t, s, **fitted(k, m, t), **law), CLIENTS, MINIMUM, LAWS)
GIVEN = st.builds(
    lambda sizes: lambda t, s: given_sizes(t, s, sizes),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
QUANTITY = st.builds(
    lambda k, m, law: lambda t, s: quantity(t, s, **fitted(k, m, t), **law),
    CLIENTS,
    MINIMUM,
    QUANTITY_LAWS,
)
CLASSWISE = st.builds(
    lambda k, a, m, r, b: (
        lambda t, s: dirichlet_classwise(t, s, **fitted(k, m, t), alpha=a, redraws=r, balance=b)
    ),
    CLIENTS,
    CONCENTRATION,
    MINIMUM,
    st.integers(0, 5),
    st.booleans(),
)
PACHINKO = st.builds(
    lambda k, a, b: lambda t, s: pachinko(t, s, clients=min(k, len(t)), alpha=a, beta=b),
    CLIENTS,
    CONCENTRATION,
    CONCENTRATION,
)
NATURAL = st.builds(
    lambda n, c, k: lambda t, s: natural_of(t, s, n, c, k),
    st.integers(1, 6),
    st.integers(0, 3),
    st.none() | st.integers(2, 6),
)
S2 = st.builds(
    lambda n_max, n_min: lambda t, s: cells_of(t, s, n_max, n_min),
    st.integers(1, 50),
    st.none() | st.integers(1, 4),
)
RECIPES = st.one_of(IID, GIVEN, QUANTITY, CLASSWISE, PACHINKO, NATURAL, S2)


@settings(deadline=None, max_examples=300)
@given(RECIPES, TABLES, SEED)
def test_parts_are_disjoint_in_range_in_order_and_repeatable(recipe: Recipe, table: Table, seed: int) -> None:
    p = recipe(table, seed)
    assert len(np.unique(p.indices)) == len(p.indices)
    assert p.indices.min() >= 0
    assert p.indices.max() < len(table)
    assert all((np.diff(row) > 0).all() for row in p)
    assert p.sizes().min() >= 1
    assert recipe(table, seed).digest == p.digest
    assert recipe(table, seed).spec == p.spec


@settings(deadline=None, max_examples=60)
@given(RECIPES, TABLES, SEED)
def test_saving_and_loading_changes_nothing(recipe: Recipe, table: Table, seed: int) -> None:
    p = recipe(table, seed).counted(table)
    with tempfile.TemporaryDirectory() as folder:
        p.save(Path(folder) / "p.npz")
        q = Partition.load(Path(folder) / "p.npz")
    assert (q.digest, q.ids, q.spec) == (p.digest, p.ids, p.spec)
    assert json.loads(json.dumps(p.spec)) == p.spec


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 60), MINIMUM, st.integers(0, 2000), QUANTITY_LAWS, SEED)
def test_sizes_sum_up_and_nobody_is_below_the_minimum(
    clients: int, minimum: int, more: int, law: dict[str, Any], seed: int
) -> None:
    n = clients * minimum + more
    name, value = law.values()
    stream = np.random.RandomState(seed % 2**32)
    sizes = draw_sizes(n, clients, name, stream, parameter=value, minimum=minimum)
    assert (int(sizes.sum()), sizes.dtype.kind, len(sizes)) == (n, "i", clients)
    assert sizes.min() >= minimum


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([iid, quantity]), LAWS, TABLES, CLIENTS, MINIMUM, SEED)
def test_sizes_by_a_law_lose_nothing(
    factory: Callable[..., Partition],
    law: dict[str, Any],
    table: Table,
    clients: int,
    minimum: int,
    seed: int,
) -> None:
    fits = fitted(clients, minimum, table)
    p = factory(table, seed, **fits, **law)
    assert len(p.indices) == len(table)
    assert p.sizes().min() >= fits["minimum"]
    if clients * minimum > len(table):
        with pytest.raises(ConfigError):
            factory(table, seed, clients=clients, minimum=minimum, **law)


@settings(deadline=None, max_examples=150)
@given(TABLES, CLIENTS, QUANTITY_LAWS, SEED)
def test_quantity_gives_every_client_its_share_of_every_class(
    table: Table, clients: int, law: dict[str, Any], seed: int
) -> None:
    clients = min(clients, len(table))
    p = quantity(table, seed, clients=clients, **law)
    counts = p.class_counts(table.labels)
    exact = p.sizes()[:, None] * np.bincount(table.labels)
    rounded_down = exact // len(table)
    assert ((counts - rounded_down) >= 0).all()
    assert ((counts - rounded_down) <= 1).all()
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(table.labels))


@settings(deadline=None, max_examples=200)
@given(TABLES, CLIENTS, CONCENTRATION, MINIMUM, st.booleans(), SEED)
def test_classwise_proportions_lose_nothing_and_reach_the_minimum(
    table: Table, clients: int, alpha: float, minimum: int, balance: bool, seed: int
) -> None:
    settings = {"clients": clients, "alpha": alpha, "minimum": minimum, "balance": balance}
    if clients * minimum > len(table):
        with pytest.raises(ConfigError):
            dirichlet_classwise(table, seed, **settings)
        return
    p = dirichlet_classwise(table, seed, **settings)
    assert len(p.indices) == len(table)
    assert p.sizes().min() >= minimum


@settings(deadline=None, max_examples=150)
@given(TABLES, CLIENTS, CONCENTRATION, CONCENTRATION, SEED)
def test_pachinko_clients_are_equal_and_as_large_as_possible(
    table: Table, clients: int, alpha: float, beta: float, seed: int
) -> None:
    clients = min(clients, len(table))
    p = pachinko(table, seed, clients=clients, alpha=alpha, beta=beta)
    assert (p.sizes() == len(table) // clients).all()


@settings(deadline=None, max_examples=150)
@given(TABLES, st.integers(1, 6), st.integers(0, 3), st.none() | st.integers(2, 6), SEED)
def test_natural_clients_are_whole_and_only_those_that_are_said_are_dropped(
    table: Table, min_examples: int, min_classes: int, max_clients: int | None, seed: int
) -> None:
    users, fit = table.column("client"), set(users_of(table, min_examples, min_classes))
    if len(fit) < 2:
        with pytest.raises((ConfigError, DataError)):
            natural(table, seed, min_examples=min_examples, min_classes=min_classes, max_clients=max_clients)
        return
    p = natural(table, seed, min_examples=min_examples, min_classes=min_classes, max_clients=max_clients)
    for name, row in zip(p.ids, p, strict=True):
        assert row.tolist() == np.flatnonzero(users == name).tolist()
        assert len(row) >= min_examples
        assert len(np.unique(table.labels[row])) >= min_classes
    assert set(p.ids) <= fit
    assert len(p) == (len(fit) if max_clients is None else min(len(fit), max_clients))
    assert p.spec["dropped"]["examples"] == len(table) - len(p.indices)


@settings(deadline=None, max_examples=150)
@given(TABLES, st.integers(1, 50), st.none() | st.integers(1, 5), SEED)
def test_cells_are_disjoint_within_bounds_and_split_no_more_than_needed(
    table: Table, n_max: int, n_min: int | None, seed: int
) -> None:
    p = cells_of(table, seed, n_max, n_min)
    if n_min is not None and n_min > p.spec["n_min"]:
        with pytest.raises(ConfigError):
            s2(table, seed, n_max=n_max, n_min=n_min)
    lat, lon = table.column("lat").tolist(), table.column("lon").tolist()
    leaves = np.array([s2cell.lat_lon_to_cell_id(*place) for place in zip(lat, lon, strict=True)], np.uint64)

    def inside(cell: int) -> list[int]:
        half = (cell & -cell) - 1  # a cell's leaves are its id, give or take its last bit
        return np.flatnonzero(
            (leaves >= np.uint64(cell - half)) & (leaves <= np.uint64(cell + half))
        ).tolist()

    least = p.spec["n_min"]
    cells = [s2cell.token_to_cell_id(name) for name in p.ids]
    assert cells == sorted(cells)
    for cell, row in zip(cells, p, strict=True):
        level = s2cell.cell_id_to_level(cell)
        assert row.tolist() == inside(cell)
        assert len(row) >= least
        assert len(row) <= n_max or level == 30
        if level > 0:
            assert len(inside(s2cell.cell_id_to_parent_cell_id(cell))) > n_max
    assert p.spec["dropped"]["examples"] == len(table) - len(p.indices)
    if n_min == 1:
        assert len(p.indices) == len(table)
    assert s2(table, seed + 1, n_max=n_max, n_min=least).digest == p.digest


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**40), st.integers(1, 50))
def test_another_seed_gives_another_partition(seed: int, step: int) -> None:
    columns = {"client": np.arange(300) % 60}
    table = Table.of(np.arange(300) % 10, columns, coarse=np.arange(10) // 2)
    for recipe in (
        lambda s: iid(table, s, clients=10, sizes="log-normal"),
        lambda s: iid(table, s, clients=3, sizes=[50, 60, 70]),
        lambda s: quantity(table, s, clients=10, sizes="power-law"),
        lambda s: dirichlet_classwise(table, s, clients=10, alpha=0.5),
        lambda s: dirichlet_classwise(table, s, clients=10, alpha=0.5, balance=True),
        lambda s: pachinko(table, s, clients=10),
        lambda s: natural(table, s, max_clients=30),
    ):
        assert recipe(seed).digest != recipe(seed + step).digest
