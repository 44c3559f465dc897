"""The costs of the models of a study without training: parameters, multiply-adds and memory.

They stand in `data.json` beside study.json, next to the populations (`fedlens.results.populations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedlens.base.errors import DataError


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
