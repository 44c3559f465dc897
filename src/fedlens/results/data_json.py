"""The content of data.json beside study.json: the clients of each case, and the costs of the models.

A population is which client holds how many examples of each class. Both are made without training, so that figures and
tables of data and of models are drawn from files alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition


@dataclass(frozen=True)
class CasePopulation:
    """The clients of one case of a study, at one seed.

    Client k holds `counts[i]` marks (see `Census`) of class `columns[i]`, for i in `offsets[k] : offsets[k + 1]`.

    Attributes:
        settings: the digest of the settings of the data, so that a population is made once.
        case: the condition of the study that it belongs to.
        method: the label of the method whose data it is, where methods differ in them; else "".
        dataset: its name.
        spec: the partition and its settings.
        ids: the clients.
        sizes: the examples of each client.
        test: how many test examples show each class.
    """

    settings: str
    case: Mapping[str, Any]
    method: str
    seed: int
    dataset: str
    spec: Mapping[str, Any]
    ids: Sequence[str]
    sizes: Sequence[int]
    classes: Sequence[str]
    columns: Sequence[int]
    counts: Sequence[int]
    offsets: Sequence[int]
    test: Sequence[int] = field(default_factory=tuple)

    @classmethod
    def of(
        cls,
        partition: Partition,
        case: Mapping[str, Any],
        *,
        settings: str = "",
        method: str = "",
        seed: int = 0,
        test: NDArray[np.int64] | None = None,
    ) -> CasePopulation:
        """The population of a partition that has a census.

        >>> p = Partition.of_owners([0, 0, 1], 2, dataset="three").counted([0, 1, 1])
        >>> CasePopulation.of(p, {"alpha": 0.1}).partition.census.dense().tolist()
        [[1, 1], [0, 1]]
        """
        census = partition.census
        if census is None:
            raise DataError("the classes of the partition were not counted", where=partition.dataset or None)
        spec = {key: written(value) for key, value in partition.spec.items()}
        return cls(
            settings,
            dict(case),
            method,
            seed,
            partition.dataset,
            spec,
            list(partition.ids),
            census.sizes.tolist(),
            list(census.classes),
            census.columns.tolist(),
            census.counts.tolist(),
            census.offsets.tolist(),
            [] if test is None else test.tolist(),
        )

    @cached_property
    def census(self) -> Census:
        """The same counts as arrays."""
        sizes = np.array(self.sizes, np.int64)
        columns, counts = np.array(self.columns, np.int32), np.array(self.counts, np.int64)
        return Census(tuple(self.classes), columns, counts, np.array(self.offsets, np.int64), sizes)

    @cached_property
    def partition(self) -> Partition:
        """A partition with these clients, sizes and counts; which examples they hold is not kept."""
        sizes = self.census.sizes
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return Partition(
            tuple(self.ids), np.arange(offsets[-1]), offsets, self.spec, self.dataset, census=self.census
        )


def population_values(populations: Sequence[CasePopulation]) -> list[dict[str, Any]]:
    """The populations as data.json has them."""
    return [asdict(population) for population in populations]


def read_populations(values: Any, where: str | None = None) -> list[CasePopulation]:
    """The populations of data.json. Raises `DataError` if they are damaged."""
    try:
        return [CasePopulation(**entry) for entry in values]
    except TypeError as error:
        raise DataError(f"the populations are corrupt: {error}", where=where) from None


def written(value: Any) -> Any:
    """The recipe with values that JSON lacks, such as an infinite alpha, as text."""
    if isinstance(value, Mapping):
        return {key: written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class CellCost:
    """The cost of the model of one cell of a study.

    Attributes:
        settings: the digest of what was asked, so that a cost is measured once.
        parameters, trainable: of the model; of these, those that are trained.
        backbone: the parameters without those of the classifier; None for a model without one.
        multiply_adds: of a forward pass for one image of `input_shape`; None if they are not known.
        batch: images of a training step.
        memory: bytes that a training step takes, as `fedlens bench memory` measures them; None if it did not.
        estimated: the estimate of the same.
        device: where it was measured.
        reason: why it was not.
    """

    settings: str
    method: str
    case: Mapping[str, Any]
    model: str
    input_shape: Sequence[int]
    classes: int
    parameters: int
    trainable: int
    backbone: int | None = None
    multiply_adds: int | None = None
    batch: int | None = None
    memory: int | None = None
    estimated: int | None = None
    device: str = ""
    reason: str | None = None


def cost_values(costs: Sequence[CellCost]) -> list[dict[str, Any]]:
    """The costs as data.json has them."""
    return [asdict(cost) for cost in costs]


def read_costs(values: Any, where: str | None = None) -> list[CellCost]:
    """The costs of data.json. Raises `DataError` if they are damaged."""
    try:
        return [CellCost(**entry) for entry in values]
    except TypeError as error:
        raise DataError(f"the costs of models are corrupt: {error}", where=where) from None
