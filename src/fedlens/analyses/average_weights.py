"""The shares that models or updates have in their weighted average."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedlens.base.errors import ConfigError


def average_weights(weights: Sequence[float], count: int) -> Tensor:
    """float64 [count]: p_k = n_k / sum_j n_j, for weights n_k such as numbers of examples.

    Raises `ConfigError` unless there are `count` finite numbers of at least 0, and one above 0.

    >>> average_weights([1, 3], 2)
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    values = torch.tensor(weights, dtype=torch.float64)
    if len(values) != count or not bool((values >= 0).all()) or not 0 < float(values.sum()) < math.inf:
        raise ConfigError(
            f"the weights {list(weights)} do not fit the average of {count}",
            where="weights",
            hint="give one number of at least 0 each, and one above 0",
        )
    return values / values.sum()
