"""Mime and MimeLite: settings that are refused, what each base optimizer starts from, and what is sent."""

import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import Uniform
from fedlens.algorithms.feddyn import dynamic
from fedlens.algorithms.mime import (
    SETTINGS,
    Base,
    along,
    base_optimizer,
    direction,
    first_statistics,
    mime,
    mimelite,
    tracked,
)
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.algorithms.scaffold import control_variate
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.local.chain import chain
from fedlens.local.rules import ClientRule, plain, proximal
from tests.identity.identity_kit import course, parts, world

LOCAL = {"lr": 0.1}
BOTH = pytest.mark.parametrize("algorithm", [mime, mimelite])


@BOTH
@pytest.mark.parametrize(
    ("optimizer", "stray", "hint"),
    [
        ("sgd", "beta", "'momentum' or 'adam'"),
        ("momentum", "beta2", "'adam'"),
        ("momentum", "eps", "'adam' or 'adagrad'"),
        ("adagrad", "beta", "'momentum' or 'adam'"),
        ("momentum", "v0", "'adam' or 'adagrad'"),
    ],
)
def test_a_setting_that_the_optimizer_does_not_have_is_refused(algorithm, optimizer, stray, hint) -> None:
    with pytest.raises(ConfigError, match=f"'{optimizer}' has no {stray}") as caught:
        algorithm(parts(world(), LOCAL), optimizer=optimizer, **{stray: 0.5})
    assert caught.value.where == stray
    assert caught.value.hint.endswith(f"take optimizer = {hint}")


@BOTH
@pytest.mark.parametrize(
    ("local", "where", "advice"),
    [
        ({"momentum": 0.5}, "local.momentum", "optimizer = 'momentum'"),
        ({"momentum": 0.5, "nesterov": True}, "local.momentum", "optimizer = 'momentum'"),
        ({"optimizer": "adam"}, "local.optimizer", "optimizer = 'adam'"),
    ],
)
@pytest.mark.parametrize("optimizer", ["momentum", "sgd"])
def test_statistics_at_the_clients_are_refused(algorithm, local, where, advice, optimizer) -> None:
    with pytest.raises(ConfigError, match="keeps the optimizer's statistics at the server") as caught:
        algorithm(parts(world(), LOCAL | local), optimizer=optimizer)
    assert caught.value.where == where
    assert advice in caught.value.hint


@BOTH
@pytest.mark.parametrize("rule", [control_variate(), chain(proximal(mu=1.0), dynamic(alpha=0.1))])
def test_a_second_correction_of_the_drift_is_refused(algorithm, rule: ClientRule) -> None:
    with pytest.raises(ConfigError, match="correct the clients' drift") as caught:
        algorithm(parts(world(), LOCAL, client=rule))
    assert caught.value.where == "client.name"


@BOTH
def test_plain_does_not_undo_it(algorithm) -> None:
    with pytest.raises(ConfigError, match="'plain' has no effect"):
        algorithm(parts(world(), LOCAL, client=plain()))


@pytest.mark.parametrize("name", ["mime", "mimelite"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optimizer", "yogi"),
        ("beta", 1.0),
        ("beta", -0.1),
        ("beta2", 1.0),
        ("eps", 0.0),
        ("eps", float("inf")),
        ("v0", -1.0),
        ("v0", float("nan")),
        ("lr", 0.0),
        ("momentum", 0.9),
    ],
)
def test_wrong_settings_are_refused(name: str, setting: str, value) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(ALGORITHMS.find(name), {setting: value}, "algorithm")
    assert caught.value.where == f"algorithm.{setting}"


def test_the_usual_values() -> None:
    assert base_optimizer("sgd") == Base("sgd")
    assert base_optimizer("momentum") == Base("momentum", beta=0.9)
    assert base_optimizer("adam") == Base("adam", 0.9, 0.99, 1e-3, 1e-6)
    assert base_optimizer("adagrad", eps=0.5) == Base("adagrad", eps=0.5, v0=0.25)
    assert base_optimizer("adagrad", eps=0.5, v0=0.0).v0 == 0.0
    assert set(SETTINGS) == {"sgd", "momentum", "adam", "adagrad"}


def test_adam_by_hand() -> None:
    base = base_optimizer("adam", beta=0.5, beta2=0.75, eps=1.0, v0=4.0)
    s = first_statistics(base, {"w": torch.zeros(1)})
    assert (s["m"]["w"].item(), s["v"]["w"].item()) == (0.0, 4.0)
    g = torch.tensor([6.0])
    # 0.5 * 6 / (2 + 1), with the statistics from before this gradient and no correction of their bias
    assert along([g], *direction(base, {n: [t["w"]] for n, t in s.items()}))[0].item() == 1.0
    s = tracked(base, {"w": g}, s)
    assert (s["m"]["w"].item(), s["v"]["w"].item()) == (3.0, 0.25 * 36 + 0.75 * 4)
    # (0.5 * 2 + 0.5 * 3) / (sqrt(12) + 1)
    u = along([torch.tensor([2.0])], *direction(base, {n: [t["w"]] for n, t in s.items()}))[0]
    assert u.item() == pytest.approx(2.5 / (12**0.5 + 1))


def test_a_step_changes_none_of_its_inputs() -> None:
    base = base_optimizer("adam")
    gradient, m, v = ([torch.full((2,), value)] for value in (1.0, 2.0, 4.0))
    along(gradient, *direction(base, {"m": m, "v": v}))
    tracked(base, {"w": gradient[0]}, {"m": {"w": m[0]}, "v": {"w": v[0]}})
    assert [t[0][0].item() for t in (gradient, m, v)] == [1.0, 2.0, 4.0]


def test_what_is_sent_is_what_the_page_says() -> None:
    """In copies of the trainable weights, eight bytes a number; the few numbers beside them aside."""
    there = world()
    size = sum(t.numel() * 8 for t in mime(parts(there, LOCAL)).parts.model.build().parameters())

    def copies(algorithm, **settings) -> tuple[int, int]:
        (step,) = course(algorithm(parts(there, LOCAL, select=Uniform(3)), **settings), there, 1).steps
        return round(step.tally.bytes_down / size / 3), round(step.tally.bytes_up / size / 3)

    assert copies(mime) == (4, 2)  # the model; the model, c and m
    assert copies(mime, optimizer="sgd") == (3, 2)
    assert copies(mime, optimizer="adam") == (5, 2)
    assert copies(mimelite) == (2, 2)
    assert copies(mimelite, optimizer="adam") == (3, 2)
    assert copies(mimelite, optimizer="sgd") == (1, 1)


def test_what_each_fills() -> None:
    for algorithm in (mime, mimelite):
        made = algorithm(parts(world(), LOCAL))
        assert made.aggregate == Mean("uniform") == Mean(made.train.weighting)
        assert made.select == Uniform()
        made = algorithm(parts(world(), LOCAL, aggregate=Mean("examples")))
        assert made.train.weighting == "examples"
