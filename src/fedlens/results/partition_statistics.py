"""Statistics of a partition: sizes, classes, distances, imbalance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlens.base.format import MISSING, count, number, setting
from fedlens.data.vertical.feature_partition import AnyPartition, FeaturePartition
from fedlens.results.data_json import written

QUANTILES = {"min": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "max": 1.0}


def imbalance(sizes: ArrayLike) -> dict[str, float]:
    """How unequal the sizes n_k of K clients are, in three numbers; all NaN if every client is empty.

    With m their mean,

        largest_over_mean = max_k n_k / m, from 1 to K,
        coefficient_of_variation = sqrt(sum_k (n_k - m)^2 / K) / m, from 0 to sqrt(K - 1),
        gini = sum_j sum_k |n_j - n_k| / (2 K^2 m), from 0 to 1 - 1 / K.

    Equal sizes give 1, 0 and 0. If one client has all examples, each has its largest value.

    >>> imbalance([0, 10])
    {'largest_over_mean': 2.0, 'coefficient_of_variation': 1.0, 'gini': 0.5}
    """
    n = np.sort(np.asarray(sizes, np.float64))
    total = float(n.sum())
    if not total:
        return dict.fromkeys(("largest_over_mean", "coefficient_of_variation", "gini"), math.nan)
    clients = len(n)
    # sum_j sum_k |n_j - n_k| = 2 sum_k (2 k - K + 1) n_k over ascending sizes, k from 0.
    pairs = 2.0 * float((2 * np.arange(clients) - clients + 1) @ n)
    return {
        "largest_over_mean": float(n[-1]) * clients / total,
        "coefficient_of_variation": float(n.std()) * clients / total,
        "gini": pairs / (2 * clients * total),
    }


def quantiles(values: NDArray[Any]) -> dict[str, float]:
    """Smallest, quartiles and largest of the values that are not NaN; NaN if there are none.

    >>> quantiles(np.array([1.0, 2.0, 4.0]))["median"]
    2.0
    """
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    if not len(known):
        return dict.fromkeys(QUANTILES, math.nan)
    levels = np.quantile(known, list(QUANTILES.values()))
    return dict(zip(QUANTILES, levels.tolist(), strict=True))


def describe(partition: AnyPartition) -> dict[str, Any]:
    """The output of `fedlens partition show --json`.

    `clients`, `examples`, `sizes` [clients], `imbalance` (see `imbalance`), `features` by name [clients],
    `dataset`, `spec` and `digest`; and, if the classes were counted, `classes_per_client` [clients],
    `client_emds` [clients] and `emd` (see `Census.client_emds`), each None otherwise. Of a partition of features also
    `shared`, the number of examples that all parties hold, `labels_at` and the `windows` [parties, 4] or None.

    >>> from fedlens.data.partition.partition import Partition
    >>> told = describe(Partition.of_owners([0, 0, 1, 1], 2).counted([0, 0, 1, 1]))
    >>> told["sizes"], told["classes_per_client"], told["client_emds"], told["emd"]
    ([2, 2], [1, 1], [1.0, 1.0], 1.0)
    """
    sizes, census = partition.sizes(), partition.census
    return {
        "dataset": partition.dataset,
        "spec": written(partition.spec),
        "digest": partition.digest,
        "clients": len(partition),
        "examples": int(sizes.sum()),
        "sizes": sizes.tolist(),
        "classes_per_client": None if census is None else census.classes_per_client().tolist(),
        "emd": None if census is None else census.emd(),
        "client_emds": None if census is None else census.client_emds().tolist(),
        "imbalance": imbalance(sizes),
        "features": {name: values.tolist() for name, values in partition.features.items()},
        **_of_parties(partition),
    }


def _of_parties(partition: AnyPartition) -> dict[str, Any]:
    if not isinstance(partition, FeaturePartition):
        return {}
    return {
        "shared": len(partition.shared),
        "labels_at": partition.labels_at,
        "windows": partition.windows and [list(window) for window in partition.windows],
    }


def recipe_name(partition: AnyPartition) -> str:
    """The name of the recipe that made the partition.

    >>> from fedlens.data.partition.partition import Partition
    >>> recipe_name(Partition.of_owners([0], 1, spec={"name": "file", "of": {"name": "iid", "clients": 1}}))
    'iid, from a file'
    """
    name, inner = partition.spec.get("name"), partition.spec.get("of")
    if name == "file" and isinstance(inner, Mapping) and inner.get("name"):
        return f"{inner['name']}, from a file"
    return str(name or "an unnamed recipe")


def numbers(partition: AnyPartition) -> list[tuple[str, str]]:
    """The statistics of a partition with their names, for a page or a terminal."""
    sizes, census = partition.sizes(), partition.census
    if isinstance(partition, FeaturePartition):
        return [
            ("Parties", count(len(partition))),
            ("Examples of a party", _spread(quantiles(sizes))),
            ("Examples that all parties hold", count(len(partition.shared))),
            ("Labels at", f"party {partition.ids[partition.labels_at]}"),
        ]
    statistics = [
        ("Clients", count(len(partition))),
        ("Examples", count(int(sizes.sum()))),
        ("Examples per client", _spread(quantiles(sizes))),
    ]
    if census is not None:
        statistics.append(("Classes", count(len(census.classes))))
        statistics.append(("Classes per client", _spread(quantiles(census.classes_per_client()))))
        statistics.append(("EMD, weighted mean", number(round(census.emd(), 4))))
        statistics.append(("EMD of each client", _spread(quantiles(census.client_emds().round(3)))))
    uneven = imbalance(sizes)
    statistics.append(("Largest client over the mean", number(uneven["largest_over_mean"])))
    statistics.append(("Sizes: coefficient of variation", number(uneven["coefficient_of_variation"])))
    statistics.append(("Sizes: Gini coefficient", number(uneven["gini"])))
    for name, values in partition.features.items():
        statistics.append((f"Feature {name}", _spread(quantiles(values))))
    return statistics


def _spread(levels: Mapping[str, float]) -> str:
    """Smallest, quartiles and largest, or one number if all are equal."""
    if levels["min"] == levels["max"]:
        return number(levels["min"])
    return ", ".join(f"{name} {number(value)}" for name, value in levels.items())


def readable(partition: AnyPartition) -> list[tuple[str, str]]:
    """The output of `fedlens partition show`, name by name."""
    settings = [f"{key} {setting(value, 20)}" for key, value in partition.spec.items() if key != "name"]
    return [
        ("Dataset", partition.dataset or MISSING),
        ("Recipe", recipe_name(partition)),
        *([("Settings", ", ".join(settings))] if settings else []),
        *numbers(partition),
        ("Digest", partition.digest),
    ]
