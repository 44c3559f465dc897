"""The accountants against published numbers, and the traps between them."""

import math
from typing import Any

import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, SingleEpochTreeAggregationDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import binom

from fedlens.base.errors import ConfigError
from fedlens.privacy.accounting import Epsilons, by_client, epsilons, noise_for, planned
from fedlens.privacy.guarantee import guarantee
from fedlens.privacy.settings import PrivacySettings

DELTA = 1e-5


def event(q: float, z: float, sampling: str = "poisson", clients: int = 1000) -> dict[str, Any]:
    relation = "replace" if sampling == "fixed" else "add-or-remove"
    drawn = {"sampling": sampling, "relation": relation, "cohort": q * clients, "clients": clients}
    return {"event": "gaussian", "q": q, "z": z, **drawn}


@pytest.mark.parametrize(
    ("q", "z", "rounds", "rdp", "pld"),
    [(0.04, 1.5, 2250, 7.329335, 6.768787), (1.0, 4.0, 50, 9.234959, 8.595866)],
)
def test_poisson_cohorts_and_everyone(q: float, z: float, rounds: int, rdp: float, pld: float) -> None:
    found = epsilons([event(q, z, "poisson" if q < 1 else "all")] * rounds, DELTA)
    assert found == Epsilons(pytest.approx(pld, rel=1e-4), pytest.approx(rdp, rel=1e-4))
    assert found.best == found.pld


def test_a_cohort_of_fixed_size_pays_for_a_sensitivity_of_two_clips() -> None:
    """RDP is given z / 2, since it halves nothing itself; PLD knows no sampling without replacement."""
    found = epsilons([event(0.04, 1.5, "fixed")] * 2250, DELTA)
    assert found.pld is None
    assert found.best == pytest.approx(52.32856, rel=1e-4)


def test_replacing_one_of_all_clients_is_halved_once_by_each_accountant() -> None:
    replaced = {**event(1.0, 4.0, "all"), "relation": "replace"}
    found = epsilons([replaced] * 50, DELTA)
    assert found.pld == pytest.approx(20.675508, rel=1e-4)
    # z = 4 under "replace" is z = 2 under "add-or-remove", where RDP has no relation to look at.
    assert found.rdp == epsilons([event(1.0, 2.0, "all")] * 50, DELTA).rdp


def test_releases_of_two_kinds_add_up() -> None:
    one, other = [event(0.04, 1.5)] * 100, [event(0.04, 1.0)] * 100
    both = epsilons([*one, *other], DELTA)
    assert both == epsilons([*other, *one], DELTA)
    assert max(epsilons(one, DELTA).best, epsilons(other, DELTA).best) < both.best
    assert epsilons([], DELTA) == Epsilons(0.0, 0.0)
    with pytest.raises(ValueError, match="no common epsilon"):
        epsilons([*one, event(0.04, 1.5, "fixed")], DELTA)


def test_without_noise_epsilon_is_infinite() -> None:
    assert epsilons([event(0.04, 1.5), event(0.04, 0.0)], DELTA) == Epsilons(math.inf, math.inf)


@pytest.mark.parametrize(
    ("epsilon", "found", "sampling"),
    [pytest.param(6.77, 1.5, "poisson", marks=pytest.mark.nightly), (6.77, 5.819, "fixed")],
)
def test_the_noise_for_an_epsilon_is_the_smallest(epsilon: float, found: float, sampling: str) -> None:
    """The price of cohorts of fixed size: 5.82 instead of 1.5."""
    wanted = event(0.04, 0.0, sampling)
    if sampling == "poisson":  # the search for the other one is the example of `noise_for`
        assert noise_for(epsilon, DELTA, 2250, wanted) == found
    for z, within in ((found, True), (found - 0.002, False)):
        assert (epsilons([{**wanted, "z": z}] * 2250, DELTA).best <= epsilon) is within


def test_an_epsilon_out_of_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no noise_multiplier up to 10,000 .*privacy\.epsilon"):
        noise_for(1e-4, 1e-9, 10**6, event(1.0, 0.0, "all"))


def settings(**changes: Any) -> PrivacySettings:
    return PrivacySettings.model_validate({"clip": 0.1, "noise_multiplier": 1.5, "delta": DELTA, **changes})


def test_a_guarantee_says_what_is_promised_and_to_whom() -> None:
    found = guarantee(settings(), [event(0.04, 1.5)] * 2250)
    assert found["sentence"] == (
        "After 2,250 rounds the model is (6.77, 1e-05)-differentially private in whether any one client takes part, "
        "with all of its examples."
    )
    assert found["assumed"][0] == (
        "Each of 1,000 clients takes part in a round by itself, with probability 0.04."
    )
    assert "The server is trusted" in found["assumed"][1]
    assert (found["epsilon_pld"], found["epsilon_rdp"]) == (
        pytest.approx(6.768787, rel=1e-4), pytest.approx(7.329335, rel=1e-4)
    )  # fmt: skip
    fixed = guarantee(settings(), [event(0.04, 1.5, "fixed")])
    assert "private in which data any one client has" in fixed["sentence"]
    assert fixed["assumed"][0] == "40 of 1,000 clients are drawn for each round, without replacement."


def test_nothing_is_promised_without_noise_or_with_noise_that_can_be_subtracted() -> None:
    seeded = guarantee(settings(noise="seeded"), [event(0.04, 1.5)] * 2250)
    assert seeded["sentence"].startswith("Nothing is promised: the noise comes from the seed")
    bare = guarantee(settings(noise_multiplier=0.0), [event(0.04, 0.0)])
    assert bare["sentence"] == "Not private: noise_multiplier is 0, so no noise was added."
    assert bare["epsilon"] is None
    assert guarantee(settings(), [event(0.04, 1.5)], unsafe=True)["sentence"].startswith(
        "Not private: record.unsafe"
    )
    assert guarantee(settings(), [])["sentence"] == "Nothing has been released yet."


def test_steps_of_an_event_are_that_many_releases() -> None:
    sampled = {**event(0.02, 1.0), "steps": 400}
    spent = by_client({"a": [sampled], "b": [sampled, {**sampled, "steps": 600}]}, DELTA)
    assert list(spent) == ["b", "a"]
    assert spent["b"] == pytest.approx(4.324169, rel=1e-4)


# -- trees of noise --------------------------------------------------------------------------------------------


def tree(z: float = 8.0, cohorts: int = 100, restart: int = 100) -> dict[str, Any]:
    drawn = {"q": 1.0, "z": z, "sampling": "once-each", "relation": "add-or-remove", "cohort": 10.0}
    return {**drawn, "event": "tree", "clients": 10 * cohorts, "restart": restart, "cohorts": cohorts}


def gaussians(times: int, z: float = 8.0) -> Epsilons:
    return epsilons([{**tree(z), "event": "gaussian"}] * times, DELTA)


def test_a_tree_of_a_hundred_steps_is_seven_gaussians() -> None:
    found = epsilons(planned(tree(), 100), DELTA)
    assert found.rdp == pytest.approx(1.374122, rel=1e-4)
    assert found == gaussians(7)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(SingleEpochTreeAggregationDpEvent(8.0, 100))
    assert found.rdp == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    for rounds, levels in ((1, 1), (2, 2), (3, 2), (4, 3), (63, 6), (64, 7)):
        assert epsilons(planned(tree(), rounds), DELTA) == gaussians(levels)


def test_clients_pay_for_each_tree_that_asked_them() -> None:
    # Two trees of 4 in a pass of 8 rounds: no client is in both. The third begins the second pass.
    assert epsilons(planned(tree(cohorts=8, restart=4), 8), DELTA) == gaussians(3)
    assert epsilons(planned(tree(cohorts=8, restart=4), 9), DELTA) == gaussians(3 + 1)
    assert epsilons(planned(tree(cohorts=8, restart=4), 16), DELTA) == gaussians(3 + 3)
    # A tree of 3 crosses from one pass to the next: rounds 1 to 3, 4 to 6, 7 to 9 of passes of 4.
    assert epsilons(planned(tree(cohorts=4, restart=3), 9), DELTA) == gaussians(2 + 2 + 2)
    assert epsilons(planned(tree(cohorts=4, restart=3), 4), DELTA) == gaussians(2)


def test_a_repeated_round_starts_a_tree_that_counts() -> None:
    before, after = planned(tree(), 7), planned(tree(), 5)
    again = [{**each, "round": each["round"] + 6} for each in after]  # round 7 twice
    assert epsilons([*before, *again], DELTA) == gaussians(3 + 3)
    later = [
        {**each, "round": each["round"] + 7} for each in after
    ]  # as after another deviation: nobody twice
    assert epsilons([*before, *later], DELTA) == gaussians(3)
    other = [{**each, "z": 4.0} for each in later]
    both = epsilons([{**tree(4.0), "event": "gaussian"}] * 3 + [tree()] * 3, DELTA)
    assert epsilons([*before, *other], DELTA) == both  # of each kind the most: a bound


@pytest.mark.nightly
@pytest.mark.parametrize(("images", "epsilon"), [(1, 3.9), (5, 27.5), (10, 71.5)])
def test_what_several_images_of_a_person_cost(images: int, epsilon: float) -> None:
    """The numbers of docs/choose-privacy.md: each image is in a batch by itself, and all may change the sum."""
    share = [float(binom.pmf(k, images, 0.02)) for k in range(images + 1)]
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(MixtureOfGaussiansDpEvent(1.0, list(range(images + 1)), share), 1000)
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, abs=0.05)
