"""The IID twin of a partition: the same clients and sizes, the examples dealt out at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedlens.core.random import derive
from fedlens.data.partition.drawing import streams
from fedlens.data.partition.partition import Partition


def reassigned(partition: Partition, seed: int) -> Partition:
    """The partition with its examples reassigned to the clients uniformly at random.

    Each client keeps its name and its number of examples; the pool of examples stays the same. Image features of
    clients are dropped, so that all clients see the images alike. What a run on the partition loses against a run on
    its twin is the cost of how the examples are distributed, at equal sizes.

    >>> p = reassigned(Partition.of_owners([0, 0, 0, 1, 1, -1], 2), seed=0)
    >>> p.sizes().tolist(), sorted(p.indices.tolist())
    ([3, 2], [0, 1, 2, 3, 4])
    """
    (stream,) = streams(derive(seed, "reassign"), 1)
    order = stream.permutation(partition.indices)
    owners = partition.owners()
    indices = order[np.lexsort((order, owners))]  # the examples of a client in ascending order
    return replace(
        partition,
        indices=indices.astype(np.int64),
        spec={**partition.spec, "reassigned": True},
        features={},
        census=None,
    )
