"""The number of examples of each client."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError, nearest
from fedlens.data.partition.dirichlet import log_weights
from fedlens.data.partition.drawing import check_population

LAWS = {"log-normal": ("sigma", 1.0), "power-law": ("exponent", 1.0), "dirichlet": ("alpha", 1.0)}
"""For each law, the name of its parameter and its default."""

_EXTREME = 1e6  # one client then has all that the minimum leaves; above it, logarithms would overflow


def draw_sizes(
    n: int,
    clients: int,
    law: str,
    stream: np.random.RandomState,
    *,
    parameter: float | None = None,
    minimum: int = 1,
) -> NDArray[np.int64]:
    """int64 [clients]: sizes that sum to `n`, each at least `minimum`.

    Client k has a weight w_k, by law and parameter:

        log-normal  w_k = exp(sigma z_k), z_k a standard normal number; sigma = 0 is equal sizes.
        power-law   w_k = r_k^(-exponent), where the ranks r are 1 .. clients in a random order: in a plot of
                    log(size) over log(rank) the sizes lie on a line. exponent = 0 is equal sizes.
        dirichlet   w ~ Dir(alpha 1), the symmetric one: alpha = inf is equal sizes.

    Sizes are in proportion to the weights, but at least `minimum`: clients that would be below it get `minimum`, and
    the others share the rest in proportion. Then they are rounded down to whole numbers, and the remaining examples go
    one by one to the largest remainders (the lower number among equal ones). There is no redrawing, so it always ends.

    Raises `ConfigError` if the law is unknown, its parameter is out of range, or `n` is too small.

    >>> sorted(draw_sizes(110, 4, "power-law", np.random.RandomState(0)).tolist())
    [13, 18, 26, 53]
    """
    check_minimum(n, clients, minimum)
    return rounded(n, _log_weights(clients, law, parameter, stream), minimum)


def law_setting(law: str, given: Mapping[str, float | None]) -> dict[str, float]:
    """The parameter of `law` by name, from settings of which None means "not given".

    Raises `ConfigError` if the law is unknown, or a setting is given that it does not use.
    """
    name, default = _parameter(law)
    refuse_unused(law, {other: value for other, value in given.items() if other != name})
    value = given.get(name)
    return {name: default if value is None else float(value)}


def refuse_unused(sizes: str, given: Mapping[str, float | None]) -> None:
    """Raises `ConfigError` if any of these settings is given, which such `sizes` do not use."""
    for name, value in given.items():
        if value is not None:
            laws = [law for law, (parameter, _) in LAWS.items() if parameter == name]
            raise ConfigError(
                f"'{name}' has no effect if sizes are {sizes}",
                where=name,
                hint=f"remove it, or take sizes = '{laws[0]}'" if laws else "remove it",
            )


def rounded(n: int, log_weights: NDArray[np.float64], minimum: int) -> NDArray[np.int64]:
    """int64 [clients]: `n` divided in proportion to exp(log_weights), with at least `minimum` for each client.

    `n` must be at least clients * minimum.
    """
    weights = np.exp(log_weights - log_weights.max())
    order = np.argsort(weights, kind="stable")
    tails = np.cumsum(weights[order][::-1])[::-1]
    # With the m lightest clients at the minimum, the next one gets (n - m minimum) w / tail. The first m for
    # which this is at least the minimum is the number of clients that are raised to it.
    left = n - minimum * np.arange(len(weights))
    lifted = int(np.argmax(left * (weights[order] / tails) >= minimum))
    free = np.sort(order[lifted:])
    shares = (n - lifted * minimum) * (weights[free] / weights[free].sum())
    whole = np.maximum(np.floor(shares), minimum)  # rounding can put a share of exactly the minimum below it
    sizes = np.full(len(weights), minimum, np.int64)
    sizes[free] = whole.astype(np.int64)
    more = n - int(sizes.sum())
    sizes[free[np.argsort(whole - shares, kind="stable")[:more]]] += 1
    return sizes


def check_minimum(n: int, clients: int, minimum: int) -> None:
    """Raises `ConfigError` if `n` examples are too few for `minimum` per client, or `minimum` is below 1."""
    check_population(n, clients)
    if minimum < 1:
        raise ConfigError(f"minimum is {minimum}, but must be at least 1", where="minimum")
    if clients * minimum > n:
        raise ConfigError(
            f"{clients} clients of at least {minimum} need {clients * minimum} examples, but there are only {n}",
            where="minimum",
            hint=f"set a minimum of at most {n // clients}, or fewer clients",
        )


def _log_weights(
    clients: int, law: str, parameter: float | None, stream: np.random.RandomState
) -> NDArray[np.float64]:
    name, default = _parameter(law)
    value = default if parameter is None else parameter
    if not value >= 0 or (law != "dirichlet" and math.isinf(value)):
        raise ConfigError(f"{name} is {value}, but must be a number of at least 0", where=name, hint="take 1")
    if law != "dirichlet":
        value = min(value, _EXTREME)
    if law == "log-normal":
        return np.asarray(value * stream.standard_normal(clients), np.float64)
    if law == "power-law":
        return np.asarray(-value * np.log(1.0 + stream.permutation(clients)), np.float64)
    return log_weights(np.full(clients, 1 / clients), value * clients, stream)


def _parameter(law: str) -> tuple[str, float]:
    if law not in LAWS:
        raise ConfigError(f"unknown distribution of sizes '{law}'", where="sizes", hint=nearest(law, LAWS))
    return LAWS[law]
