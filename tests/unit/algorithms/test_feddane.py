"""FedDANE and the exchange of gradients: settings that are refused, what is sent, and what a good reply has."""

import pytest
import torch

from fedlens.aggregate.mean import Mean
from fedlens.algorithms.client_sampling import Everyone, Uniform
from fedlens.algorithms.feddane import NAME, feddane, tilted
from fedlens.algorithms.feddyn import dynamic
from fedlens.algorithms.full_gradients import OP, expected, mean_gradient
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.algorithms.scaffold import control_variate
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.core.protocol import RoundContext
from fedlens.local.rules import ClientRule, LocalContext, Traits
from tests.identity.identity_kit import course, model, parts, world

LOCAL = {"lr": 0.1, "momentum": 0.5}
CTX = RoundContext(1, 1, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mu", -0.1),
        ("mu", float("nan")),
        ("mu", float("inf")),
        ("gradients_from", "all"),
        ("lr", 0),
        ("beta", 1),
    ],
)
def test_wrong_settings_are_refused(setting: str, value) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(ALGORITHMS.find("feddane"), {setting: value}, "algorithm")
    assert caught.value.where == f"algorithm.{setting}"


@pytest.mark.parametrize("rule", [control_variate(), dynamic(alpha=0.1)])
def test_a_second_correction_of_the_drift_is_refused(rule: ClientRule) -> None:
    with pytest.raises(ConfigError, match="correct the clients' drift") as caught:
        feddane(parts(world(), LOCAL, client=rule))
    assert caught.value.where == "client.name"


def test_a_solver_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="'feddane' modifies the steps"):
        feddane(parts(world(), LOCAL, client=ClientRule(name="exact", solve=lambda context: None)))  # type: ignore[arg-type, return-value]


def test_the_hook_changes_none_of_its_inputs() -> None:
    anchor, gradients, w, linear = ([torch.full((2,), value)] for value in (1.0, 2.0, 3.0, 4.0))
    context = LocalContext(["w"], anchor, {}, {}, 0.1, 1)
    context.saved[NAME] = linear
    assert tilted(gradients, w, context, traits=Traits(proximal=0.5))[0][0].item() == 2.0 + 4.0 + 0.5 * (
        3.0 - 1.0
    )
    assert [t[0][0].item() for t in (anchor, gradients, w, linear)] == [1.0, 2.0, 3.0, 4.0]


def test_fednova_is_told_of_the_proximal_term() -> None:
    assert feddane(parts(world(), LOCAL), mu=0.3).train.rule.traits.proximal == 0.3


def test_what_is_sent_is_what_the_page_says() -> None:
    """In copies of the trainable weights, eight bytes a number; the few numbers beside them aside."""
    there = world()
    made = feddane(parts(there, LOCAL, select=Uniform(3)))
    size = sum(t.numel() * 8 for t in made.parts.model.build().parameters())
    (step,) = course(made, there, rounds=1).steps
    assert round(step.tally.bytes_down / size / 3) == 3
    assert round(step.tally.bytes_up / size / 3) == 2


def reply(**changes):
    module = model().build()
    good = {"update": {n: torch.zeros_like(p) for n, p in module.named_parameters()}, "buffers": {}}
    return {**good, "counters": {}, "weight": 1.0, **changes}


def test_a_good_gradient_has_the_trainable_weights_alone_and_a_weight() -> None:
    there = world()
    uniform = expected(parts(there, LOCAL), "uniform")
    assert uniform.fault(reply()) is None
    assert uniform.fault(reply(weight=2.0)) == "weight is 2, outside (0, 1]"
    assert uniform.fault(reply(weight=0.0)) == "weight is 0, outside (0, 1]"
    by_examples = expected(parts(there, LOCAL), "examples")
    assert by_examples.fault(reply(weight=12.0)) is None  # the largest client's
    assert by_examples.fault(reply(weight=13.0)) == "weight is 13, outside (0, 12]"
    virtual = expected(parts(there, {**LOCAL, "examples": 32}), "examples")
    assert virtual.fault(reply(weight=32.0)) is None
    frozen = expected(parts(there, LOCAL, model(frozen=True)), "uniform")
    assert frozen.fault(reply()) == "update has an extra 0.weight"


def test_a_large_cohort_is_asked_to_reduce_and_a_small_one_is_not() -> None:
    schema = expected(parts(world(), LOCAL), "uniform")
    for size, block in ((63, None), (64, 2), (1000, 31)):
        ask = next(mean_gradient({"model": {}, "lr": 0.1}, range(size), schema, CTX))
        assert (ask.op, len(ask.requests)) == (OP, size)
        assert (ask.reduce.block if ask.reduce else None) == block


def test_what_it_fills() -> None:
    made = feddane(parts(world(), LOCAL))
    assert (made.aggregate, made.select) == (Mean("uniform"), Uniform())
    assert made.train.rule.server_rules[NAME].prepare.keywords["select"] == Uniform()  # type: ignore[union-attr]
    made = feddane(parts(world(), LOCAL, select=Everyone(), aggregate=Mean("examples")))
    assert made.train.rule.server_rules[NAME].prepare.keywords["select"] == Everyone()  # type: ignore[union-attr]
    made = feddane(parts(world(), LOCAL), gradients_from="same")
    assert made.train.rule.server_rules[NAME].prepare.keywords["select"] is None  # type: ignore[union-attr]
