"""A few shards of data per client, each shard of one class or nearly so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.partition.by_class import shuffled_by_class
from fedlens.data.partition.drawing import check_classes, check_population, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Clients


@partitioner
def shards(
    labels: NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    classes_per_client: Annotated[int, Field(ge=1, description="shards per client, each of one class")] = 2,
    scheme: Annotated[
        Literal["distinct", "mcmahan"],
        Field(
            description="'distinct': the shards of a client have different classes; 'mcmahan': sort "
            "by label, cut, and assign at random"
        ),
    ] = "distinct",
) -> Partition:
    """Each client gets `classes_per_client` shards of equal size.

    `distinct` (ghaemi2022: "we split each class into shards, and for each split randomly select data shards
    from only two random classes"): every shard is of one class, and the classes of a client are all
    different. The shards have the largest size for which there are enough of them. Discarded, at random: the rest
    of a class after its last whole shard, and shards that no client needs.

    `mcmahan` (McMahan et al. 2017, sort-and-partition): the examples are sorted by class, cut into
    `clients * classes_per_client` equal shards, and dealt at random. A shard may lie across two classes, and
    a client may get two shards of one class. Discarded, at random: the remainder of the division.

    Raises `ConfigError` if there are fewer classes than `classes_per_client` (`distinct`), or too few examples.

    >>> labels = np.repeat(np.arange(10), 60)
    >>> counts = shards(labels, 0, clients=10).class_counts(labels)
    >>> sorted(set(counts.ravel().tolist())), (counts > 0).sum(axis=1).tolist()
    ([0, 30], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    classes = check_classes(labels)
    check_population(len(classes), clients)
    make = {"distinct": _distinct, "mcmahan": _mcmahan}[scheme]
    return Partition.of_owners(make(classes, seed, clients, classes_per_client), clients)


def _mcmahan(labels: NDArray[np.int64], seed: int, clients: int, each: int) -> NDArray[np.int64]:
    """The owner of each example, -1 for nobody."""
    shuffling, dealing = streams(seed, 2)
    size = len(labels) // (clients * each)
    if size < 1:
        raise _too_few(len(labels), clients, each)
    taken = shuffling.permutation(len(labels))[: clients * each * size]
    by_class = taken[np.argsort(labels[taken], kind="stable")]
    dealt = dealing.permutation(np.repeat(np.arange(clients), each))
    owners = np.full(len(labels), -1, np.int64)
    owners[by_class] = np.repeat(dealt, size)
    return owners


def _distinct(labels: NDArray[np.int64], seed: int, clients: int, each: int) -> NDArray[np.int64]:
    """The owner of each example, -1 for nobody."""
    shuffling, choosing, dealing = streams(seed, 3)
    counts = np.bincount(labels)
    if (counts > 0).sum() < each:
        classes = int((counts > 0).sum())
        raise ConfigError(
            f"a client cannot have {each} different classes: the dataset has {classes}",
            where="classes_per_client",
            hint=f"take at most {classes}, or scheme = 'mcmahan'",
        )
    size = _largest_size(counts, clients, each)
    if size < 1:
        raise _too_few(len(labels), clients, each)
    supply = _choose_shards(np.minimum(counts // size, clients), clients * each, choosing)
    has = _deal(supply, clients, each, dealing)

    # The shuffled examples of a class are cut into shards; the first shard goes to the first client with the class.
    by_class, counts = shuffled_by_class(labels, shuffling)
    starts = np.cumsum(counts) - counts
    owners = np.full(len(labels), -1, np.int64)
    for kind in np.flatnonzero(supply):
        used = by_class[starts[kind] : starts[kind] + supply[kind] * size]
        owners[used] = np.repeat(np.flatnonzero(has[:, kind]), size)
    return owners


def _largest_size(counts: NDArray[np.int64], clients: int, each: int) -> int:
    """The largest shard of which the classes have `clients * each`, none more than `clients`; or 0."""
    low, high = 0, int(counts.sum()) // (clients * each)
    while low < high:
        size = (low + high + 1) // 2
        if np.minimum(counts // size, clients).sum() >= clients * each:
            low = size
        else:
            high = size - 1
    return low


def _choose_shards(
    available: NDArray[np.int64], wanted: int, stream: np.random.RandomState
) -> NDArray[np.int64]:
    """The number of shards of each class that are used: `wanted` in total, chosen uniformly from all shards."""
    every = np.repeat(np.arange(len(available)), available)
    return np.bincount(stream.permutation(every)[:wanted], minlength=len(available))


def _deal(
    supply: NDArray[np.int64], clients: int, each: int, stream: np.random.RandomState
) -> NDArray[np.bool_]:
    """bool [clients, classes]: which client gets a shard of which class; rows sum to `each`, columns to `supply`.

    The clients draw classes one after another; classes with more shards left are more likely. A class with one shard
    left for every remaining client is taken without drawing. So the supply of a class never exceeds the number of
    remaining clients, and the remaining shards can always be dealt: there is no dead end and no retry.
    """
    left = supply.copy()
    has = np.zeros((clients, len(supply)), bool)
    for client, to_come in zip(stream.permutation(clients), range(clients, 0, -1), strict=True):
        # The largest `each` of u ** (1 / left) are a draw without replacement with weights `left`.
        with np.errstate(divide="ignore"):
            key = np.where(left > 0, np.log(stream.random_sample(len(left))) / np.maximum(left, 1), -np.inf)
        key[left == to_come] = np.inf
        chosen = np.argsort(-key, kind="stable")[:each]
        has[client, chosen] = True
        left[chosen] -= 1
    return has


def _too_few(examples: int, clients: int, each: int) -> ConfigError:
    return ConfigError(
        f"{examples} examples are not enough for {clients} clients with {each} shards each",
        where="clients",
        hint="use fewer clients or a smaller classes_per_client",
    )
