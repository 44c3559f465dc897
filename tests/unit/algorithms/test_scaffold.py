"""SCAFFOLD: which settings go, which are refused and why, and what is said of it."""

import pytest

from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import Momentum, ServerSGD
from fedlens.algorithms.client_sampling import Fixed, Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.registry import ALGORITHMS, RULES
from fedlens.algorithms.scaffold import control_variate, scaffold
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from tests.identity.identity_kit import parts, world

LOCAL = {"lr": 0.1, "epochs": 2}


def test_what_the_paper_fills_and_what_goes_before_it() -> None:
    made = scaffold(parts(world(), LOCAL), lr=0.5)
    assert (made.select, made.aggregate, made.server) == (Uniform(), Mean("uniform"), ServerSGD(0.5))
    assert made.rule.traits.invariant
    assert made.discloses == control_variate().traits.discloses
    assert "control variate" in made.discloses[0]
    mine = {"aggregate": Mean("examples"), "server": Momentum()}
    made = scaffold(parts(world(), LOCAL, **mine), lr=0.5)
    assert (made.aggregate, made.server) == (Mean("examples"), Momentum())
    assert made.train.weighting == "examples"


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        (
            {"optimizer": "adam"},
            "local.optimizer",
            "the steps of adam, adamw and lars are no sum of gradients",
        ),
        ({"clip_norm": 1.0}, "local.clip_norm", "clipped steps are no sum of gradients"),
    ],
)
def test_option_two_is_refused_where_the_way_is_no_sum_of_gradients(change, where: str, why: str) -> None:
    there = world()
    with pytest.raises(ConfigError, match=why) as caught:
        scaffold(parts(there, LOCAL | change))
    assert caught.value.where == where
    assert "option = 'I'" in caught.value.hint
    with pytest.raises(ConfigError, match=why):
        fedavg(parts(there, LOCAL | change, client=control_variate()))
    assert scaffold(parts(there, LOCAL | change), option="I").rule.name == "control-variate"


@pytest.mark.parametrize(
    "change", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}], ids=str
)
def test_what_option_two_corrects_for_is_not_refused(change) -> None:
    assert scaffold(parts(world(), LOCAL | change)).rule.name == "control-variate"


def test_a_client_twice_in_a_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="a client can appear twice") as caught:
        scaffold(parts(world(), LOCAL, select=Fixed((0, 1, 0))))
    assert caught.value.where == "select"


def test_the_rule_is_there_once() -> None:
    with pytest.raises(ConfigError, match="'control-variate' is set twice"):
        scaffold(parts(world(), LOCAL, client=control_variate()))


@pytest.mark.parametrize(
    ("settings", "where"),
    [({"option": "III"}, "option"), ({"lr": 0}, "lr"), ({"lr": float("inf")}, "lr"), ({"eta": 1.0}, "eta")],
)
def test_wrong_settings_are_refused(settings, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(ALGORITHMS.find("scaffold"), settings, "algorithm")
    assert caught.value.where == f"algorithm.{where}"
    if "option" in settings:
        with pytest.raises(ConfigError):
            read_settings(RULES.find("control-variate"), settings, "client")
