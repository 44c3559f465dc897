"""What an aggregate keeps from round to round, what it refuses, and the fields of a rule that it must not lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean
from fedlens.algorithms.averaging import Averaging, averaging
from fedlens.algorithms.client_sampling import Uniform
from fedlens.algorithms.scaffold import control_variate
from fedlens.base.errors import HookError, RoundRefused
from fedlens.core.reduction import Refusal, Update
from fedlens.core.tree import map_tree, zeros_like
from tests.identity.identity_kit import close, course, parts, world

LOCAL = {"lr": 0.2, "epochs": 2, "batch_size": 4}


@dataclass(frozen=True)
class Momentum(Aggregate):
    """m <- beta m + mean; the update is m: the same as a server step with momentum."""

    beta: float = 0.5

    def init(self, weights: Any, federation: Any) -> Any:
        return {"m": zeros_like(weights), "rounds": 0}

    def aggregate(self, answers: Any, fields: Any, ctx: AggregateContext) -> Any:
        mean = Mean().aggregate(answers, fields)
        assert mean is not None
        m = map_tree(lambda old, new: self.beta * old + new, ctx.state["m"], mean.update)
        assert ctx.state["rounds"] == ctx.round - 1
        # `given` is still set: the server step must not write into what the state keeps.
        return replace(mean, update=m, donated=m, state={"m": m, "rounds": ctx.round})


def with_aggregate(aggregate: Aggregate, **more: Any) -> Averaging:
    return averaging(parts(world(), LOCAL, select=Uniform(3)), aggregate=aggregate, **more)


def test_momentum_in_an_aggregate_is_that_of_the_server_step() -> None:
    from fedlens.aggregate.server_steps import Momentum as ServerMomentum

    mine = course(with_aggregate(Momentum()), world(), rounds=4)
    wanted = course(with_aggregate(Mean(), server=ServerMomentum(momentum=0.5)), world(), rounds=4)
    close(mine.final, wanted.final, rtol=1e-12, atol=1e-13)
    assert [step.after["aggregate"]["rounds"] for step in mine.steps] == [1, 2, 3, 4]
    torch.testing.assert_close(
        mine.steps[-1].after["aggregate"]["m"]["0.weight"],
        mine.steps[-1].before["model"]["0.weight"] - mine.steps[-1].after["model"]["0.weight"],
    )


def test_an_aggregate_without_a_state_leaves_the_servers_state_as_it_was() -> None:
    for step in course(with_aggregate(Mean()), world(), rounds=1).steps:
        assert set(step.before) == set(step.after) == {"model", "server"}


@dataclass(frozen=True)
class Returning(Aggregate):
    """Returns what it is told to, of the mean."""

    make: Callable[[Update, AggregateContext], Any]

    def init(self, weights: Any, federation: Any) -> Any:
        return {"m": zeros_like(weights)}

    def aggregate(self, answers: Any, fields: Any, ctx: AggregateContext) -> Any:
        mean = Mean().aggregate(answers, fields)
        assert mean is not None
        return self.make(mean, ctx)


def test_a_reason_in_place_of_an_update_ends_the_round_with_a_sentence() -> None:
    few = Returning(lambda mean, ctx: Refusal(f"{mean.replies} replies were accepted, and 5 are needed."))
    with pytest.raises(RoundRefused) as caught:
        course(with_aggregate(few), world(), rounds=1)
    said = "the aggregate Returning gave no update in round 1: 3 replies were accepted, and 5 are needed."
    assert str(caught.value) == said


def changed(mean: Update, ctx: AggregateContext) -> Update:
    next(iter(ctx.state["m"].values())).add_(1)
    return mean


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (changed, "the aggregate Returning changes its input ctx.state['m']['0.weight'] in place"),
        (
            lambda mean, ctx: replace(mean, state=3),
            "the aggregate Returning returned an Update whose `state` is a int",
        ),
        (
            lambda mean, ctx: replace(mean, more={}),
            "the aggregate Returning returned an Update whose `more` lacks 'variate', which the client rule "
            "'control-variate' needs",
        ),
        (lambda mean, ctx: "no", "`aggregate` of Returning returned a str"),
    ],
)
def test_what_breaks_the_contract_is_named(make: Any, said: str) -> None:
    with pytest.raises(HookError) as caught:
        course(with_aggregate(Returning(make), client=control_variate()), world(), rounds=1)
    assert said in str(caught.value)
    assert "(test_aggregate_state.py, line " in str(caught.value)


def test_a_first_state_that_is_no_mapping_is_named() -> None:
    @dataclass(frozen=True)
    class Bad(Mean):
        def init(self, weights: Any, federation: Any) -> Any:
            return None

    with pytest.raises(HookError, match="`init` of Bad returned None"):
        course(with_aggregate(Bad()), world(), rounds=1)
