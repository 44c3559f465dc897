import numpy as np
import pytest

from fedlens.core.errors import ConfigError
from fedlens.core.registry import read_settings
from fedlens.data.partition.iid import iid


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
    with pytest.raises(ConfigError, match=r"11 clients cannot share 10 examples.*at most 10 clients"):
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
