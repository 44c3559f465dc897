"""The statistics of an audit: whether measured error rates contradict a claim of differential privacy.

Who guesses whether a client took part errs at a false positive rate alpha and a false negative rate beta. A claim is a
trade-off curve f: beta >= f(alpha) for every way to guess (Dong, Roth and Su 2022, arXiv 1905.02383). A measured point
whose 95 % Clopper-Pearson bounds lie below the curve contradicts the claim. That is a finer test than a bound on
epsilon: the audit may fail to find a fault, and then the claim may still be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedlens.privacy.accounting import deltas

FALSE_ALARM = 0.005
"""How likely an audit may accuse an honest mechanism, at most."""

_LEVELS = (0.95, 0.98, 0.99, 0.995)  # of the two bounds together; the last needs no computation: 2 x 0.25 %
_EPSILONS = (0.0, *np.geomspace(1e-3, 60, 80).tolist())  # of the lines that make a curve
_RAREST = 1e-6  # false positive rate of the grid
_MOST = 50.0  # epsilon that guesses show

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Claim:
    """The trade-off curve that releases claim: the smallest false negative rate at each false positive rate.

    Gaussian releases of everyone are mu-GDP: f(alpha) = Phi(Phi^-1(1 - alpha) - mu), mu^2 = sum 1/z^2. For others it is
    the largest of the curves of their (epsilon, delta), max(0, 1 - delta - e^epsilon alpha, e^-epsilon (1 - delta -
    alpha)), at 81 epsilons, which is at most the exact one.

    Attributes:
        events: the releases, as `fedlens.privacy.accounting` reads them, all with noise.

    >>> event = {"z": 2.0, "q": 1.0, "sampling": "all", "relation": "add-or-remove", "cohort": 10, "clients": 10}
    >>> claim = Claim((event,))
    >>> claim.mu, round(float(claim(np.array([0.1]))[0]), 4), round(claim.even, 4)
    (0.5, 0.7828, 0.4013)
    """

    events: tuple[Mapping[str, Any], ...]

    @cached_property
    def mu(self) -> float | None:
        """That of Gaussian differential privacy; None if clients are drawn."""
        if any(event["sampling"] == "fixed" or event["q"] < 1 for event in self.events):
            return None
        return math.sqrt(sum(event["z"] ** -2 for event in self.events))

    @cached_property
    def _lines(self) -> tuple[Array, Array]:
        return np.array(_EPSILONS)[:, None], np.array(deltas(self.events, _EPSILONS))[:, None]

    def __call__(self, alphas: Array) -> Array:
        """f at these false positive rates."""
        from scipy.special import ndtr, ndtri

        if self.mu is not None:
            return np.asarray(ndtr(-ndtri(alphas) - self.mu))
        epsilon, delta = self._lines
        left = 1 - delta - np.exp(epsilon) * alphas
        right = np.exp(-epsilon) * (1 - delta - alphas)
        return np.asarray(np.maximum(0, np.maximum(left, right)).max(0))

    @property
    def even(self) -> float:
        """The rate at which f(alpha) = alpha, where a guess errs as often for either client."""
        from scipy.optimize import brentq

        return float(brentq(lambda alpha: self(np.array([alpha]))[0] - alpha, 0.0, 1.0))


class Rate(NamedTuple):
    """A measured error rate with its bounds, and the runs that it is a share of."""

    rate: float
    low: float
    high: float
    of: int

    @classmethod
    def of_count(cls, n: int, of: int, level: float) -> Rate:
        """The rate of n of so many runs, with its Clopper-Pearson interval."""
        low, high = map(float, bounds(n, of, level))
        return cls(n / of, low, high, of)

    def __str__(self) -> str:
        return f"{self.rate:.4f} ({self.low:.4f} to {self.high:.4f}) of {self.of:,} runs"


def bounds(count: Any, of: int, level: float = 0.95) -> tuple[Array, Array]:
    """The Clopper-Pearson bounds of shares, of which each of the two errs with probability (1 - level) / 2.

    >>> [round(float(end), 4) for end in bounds(5, 10)]
    [0.1871, 0.8129]
    """
    from scipy.special import betaincinv

    count, tail = np.asarray(count, dtype=float), (1 - level) / 2
    low = np.where(count > 0, betaincinv(np.maximum(count, 1), of - count + 1, tail), 0.0)
    high = np.where(count < of, betaincinv(count + 1, np.maximum(of - count, 1), 1 - tail), 1.0)
    return low, high


@dataclass(frozen=True)
class AuditDesign:
    """A test of a claim by so many runs with the canary and without it.

    Attributes:
        present: the runs with the canary, of which the false negative rate is a share.
        absent: the runs without.
        level: of the Clopper-Pearson intervals.
    """

    claim: Claim
    present: int
    absent: int
    level: float = _LEVELS[0]

    @classmethod
    def of(cls, claim: Claim, present: int, absent: int) -> AuditDesign:
        """The design with the lowest level that accuses an honest mechanism with probability `FALSE_ALARM` at most."""
        designs = [cls(claim, present, absent, level) for level in _LEVELS]
        return next((design for design in designs if design.false_alarm <= FALSE_ALARM), designs[-1])

    @cached_property
    def _most_missed(self) -> NDArray[np.int64]:
        """For each number of false positives the most false negatives that contradict the claim; -1 for none."""
        needed = self.claim(bounds(np.arange(self.absent + 1), self.absent, self.level)[1])
        return np.searchsorted(bounds(np.arange(self.present + 1), self.present, self.level)[1], needed) - 1

    def contradicted(self, false_positives: int, false_negatives: int) -> bool:
        """Whether the upper bounds of both rates lie below the claimed curve."""
        return bool(false_negatives <= self._most_missed[false_positives])

    def found(self, alpha: Array, beta: Array) -> Array:
        """The probability that the claim is contradicted where the true rates are these, exactly."""
        from scipy.special import bdtr
        from scipy.stats import binom

        missed = self._most_missed
        below = np.where(missed >= 0, bdtr(np.maximum(missed, 0), self.present, beta[:, None]), 0.0)
        return np.asarray((binom.pmf(np.arange(self.absent + 1), self.absent, alpha[:, None]) * below).sum(1))

    @cached_property
    def false_alarm(self) -> float:
        """The largest probability that an honest mechanism is accused, whatever the threshold."""
        tails = np.geomspace(_RAREST, 0.1, 60)
        alphas = np.concatenate([tails, np.linspace(0.1, 0.9, 81), 1 - tails])
        return float(self.found(alphas, self.claim(alphas)).max())

    def power(self, factor: float) -> float:
        """The probability to find updates that are `factor` as long, or noise that is as much smaller."""
        faulty = Claim(tuple({**event, "z": event["z"] / factor} for event in self.claim.events))
        even = np.array([faulty.even])
        return float(self.found(even, even)[0])


def epsilon_of_guesses(
    right: int, guesses: int, canaries: int, delta: float, error: float = FALSE_ALARM
) -> float:
    """The epsilon that a run has at least, of whose guesses so many are right (Steinke et al. 2023, arXiv 2305.08846).

    For canaries that take part by fair coins of their own, a mechanism of (epsilon, delta) has as many right guesses
    with a probability of at most P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i, W ~ Bin(r, e^eps / (1 + e^eps)).

    Args:
        right: v, of the guesses.
        guesses: r, whose number is fixed before.
        canaries: m.
        error: the probability that the bound is too large.

    >>> round(epsilon_of_guesses(75, 100, 100, 0.0, 0.05), 3)
    0.702
    """
    from scipy.optimize import brentq
    from scipy.stats import binom

    def excess(epsilon: float) -> float:
        q = 1 / (1 + math.exp(-epsilon))
        just_below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q)) / np.arange(1, right + 1)
        share = just_below.max() if right else 0.0
        return float(binom.sf(right - 1, guesses, q) + 2 * canaries * delta * share) - error

    return 0.0 if excess(0.0) >= 0 else float(brentq(excess, 0.0, _MOST))
