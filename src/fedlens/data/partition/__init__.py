"""Partitions by name. A factory is called as `factory(labels, seed, *, <settings>)`."""

from __future__ import annotations

from fedlens.core.registry import Entry, Registry

_HERE = "fedlens.data.partition"

PARTITIONS = Registry(
    "partition",
    {
        "iid": Entry(f"{_HERE}.iid:iid", "every client a random share of all examples, equal sizes"),
        "shards": Entry(
            f"{_HERE}.shards:shards", "every client a few shards, each of one class (McMahan; ghaemi2022)"
        ),
        "dirichlet": Entry(
            f"{_HERE}.dirichlet:dirichlet",
            "every client a class distribution of its own from Dir(alpha p) (hsu2019, hsu2020)",
        ),
    },
)
