import math

import numpy as np
import pytest

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.partition.iid import iid
from fedlens.data.table import Table


def test_every_example_is_used_and_sizes_differ_by_at_most_one() -> None:
    p = iid(np.zeros(103, int), 0, clients=10)
    assert p.sizes().tolist() == [11] * 3 + [10] * 7
    assert sorted(p.indices.tolist()) == list(range(103))
    assert p.spec == {"name": "iid", "clients": 10, "seed": 0}


def test_clients_look_alike() -> None:
    labels = np.arange(60_000) % 10
    assert iid(labels, 0, clients=10).emd(labels) < 0.05


def test_the_partition_is_pinned() -> None:
    assert iid(np.zeros(1000, int), 7, clients=30).digest[:16] == "6acca71b4e015172"


def test_more_clients_than_examples_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"11 clients are more than the 10 examples.*at most 10"):
        iid(np.zeros(10, int), 0, clients=11)


@pytest.mark.parametrize("clients", [0, -3])
def test_no_clients_is_an_error(clients: int) -> None:
    with pytest.raises(ConfigError, match="clients"):
        iid(np.zeros(10, int), 0, clients=clients)
    with pytest.raises(ConfigError, match=r"data.partition.clients"):
        read_settings(iid, {"clients": clients}, "data.partition")


def test_a_negative_seed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="seed is -1"):
        iid(np.zeros(10, int), -1, clients=2)


def test_sizes_by_a_law_use_every_example() -> None:
    p = iid(np.zeros(110, int), 0, clients=4, sizes="power-law")
    assert sorted(p.sizes().tolist()) == [13, 18, 26, 53]
    assert sorted(p.indices.tolist()) == list(range(110))
    assert iid(np.zeros(110, int), 0, clients=4, sizes="power-law", exponent=0).sizes().tolist() == [
        28,
        28,
        27,
        27,
    ]
    spread = iid(np.zeros(10_000, int), 0, clients=100, sizes="log-normal", sigma=2, minimum=20).sizes()
    assert spread.sum() == 10_000
    assert spread.min() == 20
    assert spread.max() > 800


def test_given_sizes_are_kept_and_the_rest_is_discarded_at_random() -> None:
    given = [50, 7, 1]
    rows = [iid(np.zeros(100, int), seed, clients=3, sizes=given) for seed in range(30)]
    assert {tuple(p.sizes().tolist()) for p in rows} == {(50, 7, 1)}
    assert set(np.concatenate([p.indices for p in rows]).tolist()) == set(range(100))
    assert iid(np.zeros(58, int), 0, clients=3, sizes=given).indices.size == 58


def test_a_table_of_sets_can_be_shared_out() -> None:
    p = iid(Table.of_sets([[0, 2], [], [1], [0]]), 0, clients=2)
    assert p.sizes().tolist() == [2, 2]


def test_which_examples_a_client_gets_does_not_depend_on_the_law() -> None:
    """One random order; sizes only say where it is cut."""
    equal = iid(np.zeros(100, int), 5, clients=1, sizes=[10])
    law = iid(np.zeros(100, int), 5, clients=2, sizes="power-law")
    assert set(equal[0].tolist()) <= set(law[0].tolist())


def test_the_recipe_is_in_the_spec() -> None:
    labels = np.zeros(100, int)
    found = [
        iid(labels, 2, clients=3, sizes="log-normal", sigma=0.5).spec,
        iid(labels, 2, clients=3, sizes="power-law", minimum=4).spec,
        iid(labels, 2, clients=2, sizes=[3, 4]).spec,
    ]
    assert found == [
        {"name": "iid", "clients": 3, "sizes": "log-normal", "sigma": 0.5, "minimum": 1, "seed": 2},
        {"name": "iid", "clients": 3, "sizes": "power-law", "exponent": 1.0, "minimum": 4, "seed": 2},
        {"name": "iid", "clients": 2, "sizes": [3, 4], "seed": 2},
    ]


def test_partitions_of_unequal_sizes_are_pinned() -> None:
    found = [
        iid(np.zeros(1000, int), 7, clients=30, sizes="log-normal").digest[:16],
        iid(np.zeros(1000, int), 7, clients=30, sizes="power-law", exponent=1.2).digest[:16],
        iid(np.zeros(1000, int), 7, clients=3, sizes=[500, 20, 3]).digest[:16],
    ]
    assert found == ["33d13b9e853e5468", "5c2a2b8a4b41006d", "3cf544f186018065"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"sizes": [60, 41]}, "the sizes sum to 101, but there are only 100 examples"),
        ({"sizes": [1, 2, 3]}, "3 sizes are given for 2 clients.*set clients to 3"),
        ({"sizes": [0, 5]}, "integers of at least 1"),
        ({"sizes": [1.5, 2.0]}, "integers of at least 1"),
        ({"sizes": []}, "0 sizes|integers"),
        ({"sizes": "pareto"}, "unknown sizes 'pareto'"),
        ({"sigma": 0.0}, "'sigma' has no effect if sizes are equal"),
        ({"minimum": 2}, "'minimum' has no effect if sizes are equal"),
        ({"sizes": [5, 5], "exponent": 1.0}, "'exponent' has no effect if sizes are given"),
        ({"sizes": [5, 5], "minimum": 1}, "'minimum' has no effect if sizes are given"),
        ({"sizes": "power-law", "sigma": 1.0}, "'sigma' has no effect if sizes are power-law"),
        ({"sizes": "log-normal", "exponent": 1.0}, "'exponent' has no effect if sizes are log-normal"),
        ({"sizes": "log-normal", "sigma": -1.0}, "sigma is -1.0"),
        ({"sizes": "log-normal", "minimum": 51}, "2 clients of at least 51 need 102 examples.*at most 50"),
    ],
)
def test_sizes_that_cannot_be_are_an_error(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        iid(np.zeros(100, int), 0, **{"clients": 2, **settings})


def test_settings_are_checked_by_name() -> None:
    assert read_settings(iid, {"clients": 2, "sizes": [3, 4]}, "p")["sizes"] == [3, 4]
    assert read_settings(iid, {"clients": 2, "sizes": "power-law"}, "p")["sizes"] == "power-law"
    for wrong in ({"sizes": "other"}, {"sizes": [0]}, {"sigma": -1}, {"exponent": math.inf}, {"minimum": 0}):
        with pytest.raises(ConfigError, match=rf"data\.partition\.{next(iter(wrong))}"):
            read_settings(iid, {"clients": 2, **wrong}, "data.partition")
