"""A class distribution for each client, drawn from a Dirichlet distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError
from fedlens.data.partition.by_class import draw_classes, owners_of_draws
from fedlens.data.partition.drawing import check_classes, check_population, equal_size, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Clients, Size

_AS_ZERO = 1e-200  # below it, log(u) / (alpha p) leaves float64, and q has long had one class


@partitioner
def dirichlet(
    labels: NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    alpha: Annotated[
        float, Field(ge=0, description="concentration: 0 gives one class per client, inf gives the prior")
    ],
    prior: Annotated[
        Literal["uniform", "data"] | list[float],
        Field(
            description="p: 'uniform', 'data' (the class distribution of the data), or one number per class"
        ),
    ] = "uniform",
    size: Size = None,
) -> Partition:
    """Each client k draws a class distribution q_k ~ Dir(alpha p), and from it examples without replacement.

    hsu2019 section 3; hsu2020 appendix B.1. p is a *distribution*, so a uniform prior over C classes gives
    each class the concentration alpha / C, not alpha. Clients are of equal size and filled one after another,
    example by example: a class is drawn from q_k, then an unassigned example of that class. When a set S of
    classes is exhausted, Eq. 5 continues with

        q~_k(y) = 0 for y in S, and q_k(y) / (1 - sum_{s in S} q_k(s)) otherwise.

    For alpha = 0, q_k has all mass on one class, chosen by p. When this class is exhausted, Eq. 5 is 0/0, and q_k
    is drawn again on the remaining classes; so it is whenever no mass is left. For alpha = inf, q_k = p.

    Discarded, at random within the classes: the examples beyond `clients * size`. By default `size` is the
    number of examples (of classes with a prior above 0) divided by `clients`, rounded down.

    Raises `ConfigError` if alpha is negative or NaN, the prior is not a distribution over the classes, or there are
    too few examples.

    >>> labels = np.repeat(np.arange(10), 500)
    >>> one_class = dirichlet(labels, 0, clients=10, alpha=0.0)
    >>> one_class.sizes().tolist()[:3], round(one_class.emd(labels), 2)
    ([500, 500, 500], 1.8)
    """
    classes = check_classes(labels)
    check_population(len(classes), clients)
    counts = np.bincount(classes)
    p = _prior(prior, counts)
    each = equal_size(size, int(counts[p > 0].sum()), clients)
    shuffling, concentration, drawing = streams(seed, 3)
    left = np.where(p > 0, counts, 0)
    drawn = np.empty((clients, each), np.int16 if len(left) <= np.iinfo(np.int16).max else np.int32)
    for row in drawn:
        weights = log_weights(p, alpha, concentration)
        row[:] = draw_classes(left, drawing.random_sample(each), partial(_remaining, weights))
    owners = owners_of_draws(classes, drawn.ravel(), np.repeat(np.arange(clients), each), shuffling)
    return Partition.of_owners(owners, clients, spec={"size": each})


def _remaining(weights: NDArray[np.float64], alive: NDArray[np.int64]) -> NDArray[np.float64]:
    """The cumulative distribution of q~_k: Eq. 5 on the remaining classes."""
    return distribution_function(weights[alive])


def log_weights(p: NDArray[np.float64], alpha: float, stream: np.random.RandomState) -> NDArray[np.float64]:
    """[C]: logarithms of numbers proportional to a draw q ~ Dir(alpha p); -inf where p is 0.

    For a small alpha, all entries of q but one underflow, and Eq. 5 would divide by zero; with logarithms, dropping
    exhausted classes and normalizing is exact. Uses Gamma(a) = Gamma(a + 1) U^(1/a). At alpha = 0 the weights have
    the order of repeated draws by p without replacement, so normalizing again on the remaining classes *is* the new
    draw of q on them: log(U) / p gives the order.
    """
    with np.errstate(divide="ignore"):
        if math.isinf(alpha):
            return np.log(p)
        some = p > 0
        weights = np.full(len(p), -np.inf)
        exponential = -np.log1p(-stream.random_sample(int(some.sum())))
        if alpha < _AS_ZERO:
            place = np.empty(len(exponential))
            place[np.argsort(exponential / p[some], kind="stable")] = np.arange(len(exponential))
            weights[some] = -1e6 * place  # so far apart that exp() of the difference is 0
        else:
            a = alpha * p[some]
            weights[some] = np.log(stream.standard_gamma(a + 1)) - exponential / a
        return weights


def distribution_function(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """[C]: the cumulative sums of the normalized weights; the last is exactly 1."""
    total = np.cumsum(np.exp(log_weights - log_weights.max()))
    normalized: NDArray[np.float64] = total / total[-1]
    return normalized


def _prior(prior: str | Sequence[float], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    if isinstance(prior, str):
        p = np.ones(len(counts)) if prior == "uniform" else counts.astype(np.float64)
    else:
        p = np.array(prior, np.float64)
        if p.shape != counts.shape:
            raise ConfigError(
                f"the prior has {p.size} numbers, but there are {len(counts)} classes", where="prior"
            )
        if not (np.isfinite(p).all() and p.min() >= 0 and p.sum() > 0):
            raise ConfigError(
                "the numbers of the prior must be finite, at least 0, and not all 0", where="prior"
            )
    normalized: NDArray[np.float64] = p / p.sum()
    return normalized
