"""Whatever the examples show, the settings and the seed: what has to be true of the partitions that take sets.

And of those that are made of other partitions, or read from a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.partition.detection_frequency import detection_frequency
from fedlens.data.partition.feature import NEUTRAL, feature
from fedlens.data.partition.from_file import from_file
from fedlens.data.partition.iid import iid
from fedlens.data.partition.lda_multilabel import lda_multilabel
from fedlens.data.partition.mix import mix
from fedlens.data.partition.partition import Partition
from fedlens.data.shifts import shifted
from fedlens.data.table import Table

Recipe = Callable[[Table, int], Partition]


def sets_of(masks: bytes) -> list[list[int]]:
    """One example per byte, which shows the classes of the bits that are set; every other one shows a class twice."""
    sets = [[k for k in range(8) if mask >> k & 1] for mask in masks]
    return [shown + shown[: row % 2] for row, shown in enumerate(sets)]


def table_of(masks: bytes, single: bool) -> Table:
    """Examples of several classes each, or of one."""
    if single:
        return Table.of(np.frombuffer(masks, np.uint8) % 8, classes=tuple("abcdefgh"))
    return Table.of_sets(sets_of(masks), classes=8)


# Bytes are drawn at once; lists of lists took so long on a busy machine that Hypothesis' health check failed.
ANY_TABLES = st.builds(table_of, st.binary(min_size=1, max_size=60), st.booleans())
# At least one example shows a class.
TABLES = st.builds(
    lambda one, masks, single: table_of(bytes([1 << one]) + masks, single),
    st.integers(0, 7),
    st.binary(max_size=60),
    st.booleans(),
)
SEED = st.integers(0, 2**63)
CLIENTS = st.integers(1, 12)
ALPHA = st.one_of(st.just(0.0), st.just(float("inf")), st.floats(1e-9, 1e9), st.floats(0, None))
SHARE = st.floats(0, 1)

# Valid by construction: settings that the table does not allow are lowered. That they are refused is tested below.


def lda(table: Table, seed: int, clients: int, minimum: int, ignore: list[int], **more: Any) -> Partition:
    """Ignores no class without which no example has one; the clients and their minimum fit the examples left."""
    kept = np.isin(table.marks, ignore, invert=True)
    if not kept.any():
        ignore, kept = [], np.full(len(table.marks), True)
    shown = len(np.unique(table.rows[kept]))
    minimum = min(minimum, shown)
    clients = min(clients, shown // minimum)
    return lda_multilabel(table, seed, clients=clients, minimum=minimum, ignore=tuple(ignore), **more)


def turns(table: Table) -> int:
    """How many clients get images if each takes all images that are left of the most frequent class."""
    left, count = np.unique(np.stack([table.rows, table.marks], axis=1), axis=0), 0
    while len(left):
        taken = left[left[:, 1] == np.bincount(left[:, 1]).argmax(), 0]
        left, count = left[~np.isin(left[:, 0], taken)], count + 1
    return count


def frequency(table: Table, seed: int, clients: int, to: Any) -> Partition:
    """At most as many clients as get images."""
    return detection_frequency(table, seed, clients=min(clients, turns(table)), to=to)


def features(table: Table, seed: int, clients: int, **widths: float) -> Partition:
    """At least one feature differs between the clients."""
    if not any(widths.values()):
        widths["noise"] = 0.5
    return feature(table, seed, clients=min(clients, len(table)), rotation=0, **widths)


LDA = st.builds(
    lambda k, alpha, least, ignore, **more: lambda t, s: lda(t, s, k, least, ignore, alpha=alpha, **more),
    CLIENTS,
    ALPHA,
    st.integers(1, 4),
    st.lists(st.integers(0, 7), max_size=3),
    redraws=st.integers(0, 3),
    balance=st.booleans(),
    order=st.sampled_from(["rarest", "index"]),
)
FREQUENCY = st.builds(
    lambda k, to: lambda t, s: frequency(t, s, k, to),
    CLIENTS,
    st.sampled_from(["turns", "fewest", "rest"]),
)
FEATURE = st.builds(
    lambda k, b, c, u, n: lambda t, s: features(t, s, k, brightness=b, contrast=c, blur=10 * u, noise=n),
    CLIENTS,
    SHARE,
    SHARE,
    SHARE,
    SHARE,
)
NAMES = {
    "lda": ("fedlens.data.partition.lda_multilabel:lda_multilabel", {"alpha": 0.3}),
    "frequency": ("fedlens.data.partition.detection_frequency:detection_frequency", {}),
    "feature": ("fedlens.data.partition.feature:feature", {"rotation": 0}),
    "iid": ("iid", {}),
}
MOST: dict[str, Callable[[Table], int]] = {
    "lda": lambda table: len(np.unique(table.rows)),
    "frequency": turns,
    "feature": len,
    "iid": len,
}


def mixed(
    table: Table, seed: int, outside: tuple[str, int], inside: tuple[str, int], small: Any
) -> Partition:
    """Lowers the clients until both take the data; the inner one takes every part, or at least one if others may go."""

    def named(kind: str, clients: int) -> dict[str, Any]:
        return {"name": NAMES[kind][0], "clients": clients, **NAMES[kind][1]}

    (kind, clients), (within, each) = outside, inside
    if kind == within == "feature":  # both would say how clients see
        within = "iid"
    outer = named(kind, min(clients, MOST[kind](table)))
    parts = [table.take(row) for row in mix(table, seed, outer=outer, inner=named("iid", 1))]
    bound = min if small == "stop" else max
    if not bound(map(MOST[within], parts)):
        within = "iid"
    each = min(each, bound(map(MOST[within], parts)))
    return mix(table, seed, outer=outer, inner=named(within, each), small=small)


KIND = st.tuples(st.sampled_from(sorted(NAMES)), st.integers(1, 4))
MIX = st.builds(
    lambda outer, inner, small: lambda t, s: mixed(t, s, outer, inner, small),
    KIND,
    KIND,
    st.sampled_from(["stop", "whole", "drop"]),
)
RECIPES = st.one_of(LDA, FREQUENCY, FEATURE, MIX)


@settings(deadline=None, max_examples=100)
@given(RECIPES, TABLES, SEED)
def test_parts_are_disjoint_in_range_in_order_not_empty_and_repeatable(
    recipe: Recipe, table: Table, seed: int
) -> None:
    p = recipe(table, seed)
    assert len(np.unique(p.indices)) == len(p.indices)
    assert p.indices.min() >= 0
    assert p.indices.max() < len(table)
    assert p.sizes().min() >= 1
    assert all((np.diff(row) > 0).all() for row in p)
    assert recipe(table, seed).digest == p.digest
    with tempfile.TemporaryDirectory() as folder:
        p.save(Path(folder) / "p.npz")
        assert Partition.load(Path(folder) / "p.npz").spec == p.spec


@settings(deadline=None, max_examples=80)
@given(st.one_of(LDA, FREQUENCY, FEATURE), TABLES, SEED)
def test_nothing_is_lost(recipe: Recipe, table: Table, seed: int) -> None:
    p = recipe(table, seed)
    assert sorted(p.indices.tolist()) == list(range(len(table)))


@settings(deadline=None, max_examples=100)
@given(ANY_TABLES, CLIENTS, ALPHA, st.integers(1, 5), SEED)
def test_lda_deals_whenever_there_are_enough_images_with_a_class(
    table: Table, clients: int, alpha: float, minimum: int, seed: int
) -> None:
    """Then everybody has the minimum; otherwise it is refused."""
    shown = int((np.diff(table.offsets) > 0).sum())
    try:
        p = lda_multilabel(table, seed, clients=clients, alpha=alpha, minimum=minimum)
    except ConfigError:
        assert shown < clients * minimum
        return
    assert shown >= clients * minimum
    with_class = np.diff(table.offsets)[p.indices] > 0
    assert np.bincount(p.owners()[with_class], minlength=clients).min() >= minimum


@settings(deadline=None, max_examples=80)
@given(TABLES, CLIENTS, st.sampled_from(["turns", "fewest", "rest"]), SEED, st.randoms())
def test_frequency_takes_classes_whole_and_knows_no_order(
    table: Table, clients: int, to: Any, seed: int, random: Any
) -> None:
    recipe = lambda t, s: frequency(t, s, clients, to)  # noqa: E731
    p = recipe(table, seed)
    owner = np.empty(len(table), int)
    owner[p.indices] = p.owners()
    counts = np.bincount(np.unique(table.rows * 8 + table.marks) % 8, minlength=8)
    first = table.rows[table.marks == counts.argmax()]
    assert (owner[first] == 0).all()
    # Another order of the images: those with a class go to the same clients.
    order = np.array(random.sample(range(len(table)), len(table)))
    again = recipe(table.take(order), seed + 1)
    other = np.empty(len(table), int)
    other[order[again.indices]] = again.owners()
    shown = np.diff(table.offsets) > 0
    np.testing.assert_array_equal(owner[shown], other[shown])


@settings(deadline=None, max_examples=80)
@given(TABLES, CLIENTS, SEED)
def test_feature_splits_as_evenly_as_whole_numbers_allow(table: Table, clients: int, seed: int) -> None:
    p = feature(table, seed, clients=min(clients, len(table)), rotation=0)
    assert np.ptp(p.sizes()) <= 1
    if table.single:
        assert np.ptp(p.class_counts(table.labels, 8), axis=0).max() <= 1


@settings(deadline=None, max_examples=60)
@given(ANY_TABLES, st.integers(1, 5), st.sampled_from(["turns", "fewest", "rest"]), SEED)
def test_frequency_refuses_more_clients_than_get_images(table: Table, more: int, to: Any, seed: int) -> None:
    with pytest.raises(ConfigError):
        detection_frequency(table, seed, clients=turns(table) + more, to=to)


@settings(deadline=None, max_examples=60)
@given(TABLES, st.integers(1, 5), st.sampled_from(["stop", "whole", "drop"]), SEED)
def test_mix_refuses_what_no_part_takes(table: Table, more: int, small: Any, seed: int) -> None:
    one, many = {"name": "iid", "clients": 1}, {"name": "iid", "clients": len(table) + more}
    for outer, inner in ((many, one), (one, many)):
        with pytest.raises(ConfigError):
            mix(table, seed, outer=outer, inner=inner, small=small)


@settings(deadline=None, max_examples=50)
@given(MIX, TABLES, SEED)
def test_clients_of_a_mix_lie_within_those_of_the_outer_partition(
    recipe: Recipe, table: Table, seed: int
) -> None:
    p = recipe(table, seed)
    outer = {"inner": {"name": "iid", "clients": 1}, "outer": p.spec["outer"]}
    whole = mix(table, seed, small="stop", **outer)
    parts = {name.removesuffix("/0"): set(row.tolist()) for name, row in zip(whole.ids, whole, strict=True)}
    held: dict[str, int] = {}
    for name, row in zip(p.ids, p, strict=True):
        part = name.partition("/")[0]
        assert set(row.tolist()) <= parts[part]
        held[part] = held.get(part, 0) + len(row)
    # Nothing here discards, so that a part is there as a whole or dropped as a whole.
    assert all(count == len(parts[part]) for part, count in held.items())
    assert len(held) == len(parts) or p.spec["small"] == "drop"
    stayed = [k for k, name in enumerate(p.ids) if "/" not in name]
    assert not stayed or p.spec["small"] == "whole"
    if "feature" not in p.spec["outer"]["name"]:
        assert all(values[k] == NEUTRAL[name] for name, values in p.features.items() for k in stayed)


@settings(deadline=None, max_examples=50)
@given(st.one_of(LDA, FREQUENCY, FEATURE), TABLES, SEED, st.integers(0, 100))
def test_a_file_is_the_partition_but_for_what_is_held_out(
    recipe: Recipe, table: Table, seed: int, cut: int
) -> None:
    table = replace(table, dataset="toys")
    p = replace(recipe(table, seed).counted(table), dataset="toys")
    kept = np.flatnonzero(np.random.default_rng(cut).random(len(table)) < 0.7)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/p.npz"
        p.save(path)
        assert from_file(table, seed, path=path).digest == p.digest
        some = table.take(kept)
        try:
            q = from_file(some, seed, path=path)
        except DataError:
            assert len(kept) == 0
            return
    assert q.ids == p.ids
    for mine, row in zip(q, p, strict=True):
        assert kept[mine].tolist() == [i for i in row.tolist() if i in set(kept)]


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(sorted(NEUTRAL)), st.lists(st.floats(0, 3, width=32), min_size=6, max_size=6)
    ),
    st.permutations(range(6)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_an_image_is_shifted_the_same_in_any_company(
    by: dict[str, list[float]], order: list[int], size: int, channels: int, height: int, width: int
) -> None:
    own = torch.Generator().manual_seed(size)
    images = torch.randint(0, 256, (6, channels, height, width), dtype=torch.uint8, generator=own)
    numbers = {name: torch.tensor(values) for name, values in by.items()}
    positions = torch.arange(6) * 1000
    whole = shifted(images, numbers, positions)
    for start in range(0, 6, size):
        at = torch.tensor(order[start : start + size])
        some = {name: values[at] for name, values in numbers.items()}
        assert torch.equal(shifted(images[at], some, positions[at]), whole[at])
    for k in range(6):
        if all(values[k] == NEUTRAL[name] for name, values in by.items()):
            assert torch.equal(whole[k], images[k])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**40), st.integers(1, 50))
def test_another_seed_gives_another_partition(seed: int, step: int) -> None:
    table = Table.of(np.arange(300) % 10)
    two = {"name": "iid", "clients": 2}
    for recipe in (
        lambda s: lda_multilabel(table, s, clients=5, alpha=1.0),
        lambda s: feature(table, s, clients=5),
        lambda s: mix(table, s, outer=two, inner=two),
    ):
        assert recipe(seed).digest != recipe(seed + step).digest
    assert iid(table, seed, clients=5).digest != feature(table, seed, clients=5).digest
