"""The statistics of an audit: the claimed curve, the exact false alarm and power, and the bound from guesses."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from fedlens.privacy.audit import FALSE_ALARM, AuditDesign, Claim, epsilon_of_guesses

ALPHAS = np.linspace(0.01, 0.99, 25)
EVENT = {"z": 2.0, "q": 1.0, "sampling": "all", "relation": "add-or-remove", "cohort": 10, "clients": 10}


def test_the_curve_of_lines_is_that_of_gaussian_privacy_but_for_its_grid() -> None:
    assert Claim((EVENT,) * 4).mu == 1.0
    claim = Claim((EVENT,))
    assert claim(ALPHAS) == pytest.approx(norm.cdf(norm.isf(ALPHAS) - 0.5))
    lines = Claim(({**EVENT, "q": 1 - 1e-12, "sampling": "poisson"},))
    assert lines.mu is None
    assert (lines(ALPHAS) <= claim(ALPHAS) + 1e-4).all()
    assert lines(ALPHAS) == pytest.approx(claim(ALPHAS), abs=4e-3)


def test_the_power_and_the_false_alarm_of_1000_runs_at_epsilon_2() -> None:
    design = AuditDesign.of(Claim((EVENT,)), 450, 450)
    assert design.level == 0.95
    assert design.false_alarm == pytest.approx(0.0023, abs=2e-4)
    assert design.power(2.0) == pytest.approx(0.9986, abs=2e-4)
    assert design.power(1.2) == pytest.approx(0.047, abs=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("runs", [100, 200, 450, 2500])
@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.0, 3.0, 4.0])
def test_an_honest_mechanism_is_seldom_accused_at_any_size(runs: int, mu: float) -> None:
    assert AuditDesign.of(Claim(({**EVENT, "z": 1 / mu},)), runs, runs).false_alarm <= FALSE_ALARM


def accused(mu: float, audits: int) -> float:
    """The share of audits of scores N(0, 1) and N(mu, 1) that find a violation of mu = 0.5."""
    rng = np.random.default_rng(0)
    design, count = AuditDesign.of(Claim((EVENT,)), 450, 450), 0
    for _ in range(audits):
        first = rng.standard_normal((2, 50)).mean(1)
        threshold = (first[0] + first[1] + mu) / 2
        wrong = [rng.binomial(450, p) for p in (norm.sf(threshold), norm.cdf(threshold - mu))]
        count += design.contradicted(*wrong)
    return count / audits


def test_audits_of_drawn_scores_accuse_as_often_as_computed() -> None:
    assert accused(0.5, 1000) <= FALSE_ALARM
    assert accused(1.0, 200) > 0.97


@pytest.mark.nightly
def test_many_audits_of_drawn_scores() -> None:
    assert accused(0.5, 100_000) <= FALSE_ALARM
    assert accused(0.6, 20_000) == pytest.approx(0.047, abs=0.01)


@pytest.mark.parametrize(("right", "delta"), [(75, 0.0), (75, 1e-5), (100, 1e-5), (60, 1e-3)])
def test_the_bound_of_guesses_is_where_the_p_value_of_the_paper_is_the_error(
    right: int, delta: float
) -> None:
    """The p-value as in the program of the paper (2305.08846), written by its sums."""
    epsilon = epsilon_of_guesses(right, 100, 200, delta)
    q = 1 / (1 + math.exp(-epsilon))
    largest = total = 0.0
    for i in range(1, right + 1):
        total += binom.pmf(right - i, 100, q)
        largest = max(largest, total / i)
    assert binom.sf(right - 1, 100, q) + largest * delta * 2 * 200 == pytest.approx(
        FALSE_ALARM, rel=1e-4
    ) or (epsilon == 0)
