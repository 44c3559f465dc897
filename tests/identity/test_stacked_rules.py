"""Rules of a user's own, of several clients at once: what they find is each client's, or is said not to be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.algorithms.client_sampling import Uniform
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError, HookError
from fedlens.core.protocol import Call, Client
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.engines.vectorized import vectorized
from fedlens.local.chain import chain
from fedlens.local.rules import ClientRule, LocalContext, Traits, proximal
from fedlens.local.vectorized.steps import Steps
from tests.identity.identity_kit import (
    CLASSES,
    course,
    model,
    parts,
    world,
)
from tests.identity.stacked_kit import STEPS, agree


def scaled(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
    """Each leaf's gradient times what `start` left, towards the anchor, and to a tree that the server sent to all."""
    pull = torch._foreach_sub(parameters, context.anchor)
    return [
        g * context.saved["times"] + context.saved["pull"] * p + t
        for g, p, t in zip(gradients, pull, context.saved["toward"], strict=True)
    ]


@pytest.mark.parametrize("kind", ["the same number", "a number of each", "a tensor of each"])
def test_what_start_leaves_is_each_clients_own(kind: str) -> None:
    def start(context: LocalContext) -> None:
        n = len(context.problem.data)
        context.saved["times"] = {"the same number": 0.7, "a number of each": n / 9}.get(
            kind, torch.tensor(n / 9)
        )
        context.saved["pull"] = 0.2
        context.saved["toward"] = [w * n / 50 for w in context.anchor]

    rule = ClientRule(name="mine", start=start, grad=scaled, traits=Traits(stackable=True))
    agree(fedavg(parts(world(), STEPS, select=Uniform(4), client=rule)), world())


OF_NO_LEAF = {"a number": (1,), "a number of each hidden unit": (5,), "a number of each class": (CLASSES, 1)}


@pytest.mark.parametrize("kind", OF_NO_LEAF)
def test_a_tensor_that_belongs_to_no_leaf_stands_against_the_axes_that_it_would_alone(kind: str) -> None:
    """As many clients as classes: with one more axis it would stand against the wrong one, and nobody would know."""

    def start(context: LocalContext) -> None:
        context.saved["times"] = torch.full(
            OF_NO_LEAF[kind], len(context.problem.data) / 9, dtype=torch.float64
        )

    def grad(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
        found = list(gradients)
        found[-2] = found[-2] * context.saved["times"]  # the last layer's weight, [classes, hidden units]
        return found

    rule = ClientRule(name="mine", start=start, grad=grad, traits=Traits(stackable=True))
    agree(fedavg(parts(world(), STEPS, select=Uniform(CLASSES), client=rule)), world())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_rate_that_start_sets_is_each_clients_own(share: float) -> None:
    """Of some clients or of all; two of them have the same one."""

    def start(context: LocalContext) -> None:
        if context.problem.client.id != 0 or share:
            context.lr *= 0.25 + len(context.problem.data) // 6 / 4

    rule = ClientRule(name="slower", start=start, grad=scaled_back, traits=Traits(stackable=True))
    agree(fedavg(parts(world(), STEPS | {"momentum": 0.3}, client=rule)), world())
    agree(fedavg(parts(world(), STEPS, model(dropout=0.3), client=replace(rule, grad=None))), world())


def scaled_back(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
    return [
        g * (0.1 / context.lr) + context.settings.lr * p for g, p in zip(gradients, parameters, strict=True)
    ]


def test_an_anchor_that_start_sets_is_refused() -> None:
    def start(context: LocalContext) -> None:
        context.anchor = [0.5 * value for value in context.anchor]

    made = fedavg(
        parts(world(), STEPS, client=ClientRule(name="mine", start=start, traits=Traits(stackable=True)))
    )
    with pytest.raises(
        HookError, match=r"`start` of the client rule 'mine' replaces its input context\.anchor"
    ):
        course(made, world(), engine=vectorized())


NOT_THERE: dict[str, Any] = {
    "state": lambda context: context.state.get("x", 0.0), "targets": lambda context: len(context.targets),
    "steps": lambda context: context.steps, "problem": lambda context: len(context.problem.data),
    "batch": lambda context: context.batch, "features": lambda context: len(context.features),
    "proximal": lambda context: context.proximal,
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_a_stacked_visit_does_not_stand_for_is_not_there(name: str) -> None:
    """Known before anything runs, since the rule needs nothing of the server."""

    def grad(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
        NOT_THERE[name](context)
        return gradients

    made = fedavg(
        parts(world(), STEPS, client=ClientRule(name="mine", grad=grad, traits=Traits(stackable=True)))
    )
    with pytest.raises(
        ConfigError, match=rf"context\.{name} is not available to `grad`.*in context\.saved, in `start`"
    ):
        course(made, world(), engine=vectorized())


@pytest.mark.parametrize("how", [lambda p: p["pull"], lambda p: p.get("pull", 0.0), lambda p: "pull" in p])
def test_what_the_server_sends_to_each_is_not_there_for_all(how: Any) -> None:
    def grad(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
        how(context.payload)
        assert context.payload.get("absent", 3) == 3
        assert "lr" in context.payload
        return gradients

    train = fedavg(
        parts(world(), STEPS, client=ClientRule(name="mine", grad=grad, traits=Traits(stackable=True)))
    ).train
    tree = tree_of(model().build())

    def calls(pulls: Sequence[float]) -> list[Call]:
        return [
            Call(
                {"model": tree, "lr": 0.1, "pull": pull},
                Client(k, world().clients[k], {}, Secrets((k,)), {}, torch.device("cpu")),
                Rng((k,)),
            )
            for k, pull in enumerate(pulls)
        ]

    assert not any(isinstance(found, Exception) for found in train.together(calls([0.5, 0.5])))
    with pytest.raises(RuntimeError, match=r"context\.payload\['pull'\] is not available"):
        train.together(calls([0.5, 0.7]))


def test_memory_that_runs_out_in_a_full_gradient_is_no_clients_fault(monkeypatch) -> None:
    from fedlens.local.vectorized import context as stacked_visit
    from fedlens.local.vectorized import train_group as together

    def scarce(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    train = ALGORITHMS.find("scaffold")(parts(world(), STEPS), option="I").train
    tree = tree_of(model().build())
    zeros = {name: torch.zeros_like(value) for name, value in tree.items()}
    calls = [
        Call(
            {"model": tree, "lr": 0.1, "variate": zeros},
            Client(k, world().clients[k], {}, Secrets((k,)), {}, torch.device("cpu")),
            Rng((k,)),
        )
        for k in range(2)
    ]
    for place, name in ((together, "full_gradients"), (stacked_visit, "_stack")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, scarce)
            with pytest.raises(torch.OutOfMemoryError):
                together.train_together(train, calls)
    assert not any(isinstance(found, Exception) for found in together.train_together(train, calls))


def test_a_rule_that_does_not_say_that_it_may_be_stacked_is_refused() -> None:
    for rule, said in (
        (ClientRule(name="mine", grad=scaled), "the client rule 'mine' does not declare"),
        (ClientRule(finish=lambda p, context: ({}, None)), "a client rule without a name does not declare"),
        (chain(proximal(mu=0.1), ClientRule(name="mine", grad=scaled)), "'proximal.mine' does not declare"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            course(fedavg(parts(world(), STEPS, client=rule)), world(), engine=vectorized())
        assert "stackable=True" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedprox", {"mu": 0.5}), ("scaffold", {}), ("scaffold", {"option": "I"}), ("feddyn", {"alpha": 0.5}),
        ("mime", {"beta": 0.5}), ("mime", {"optimizer": "adam", "eps": 0.1}), ("mimelite", {"beta": 0.5}),
        ("feddane", {"mu": 0.3}),
    ],
)  # fmt: skip
def test_the_rules_of_fedlens_bend_the_gradients_of_all_at_once(
    name: str, settings: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setattr(Steps, "_modified_each", lambda *given: pytest.fail("one by one"))
    course(ALGORITHMS.find(name)(parts(world(), STEPS), **settings), world(), 2, engine=vectorized())


def test_what_only_other_hooks_look_at_keeps_no_gradients_from_being_modified_at_once(monkeypatch) -> None:
    """FedIR keeps its weights of classes beside what SCAFFOLD's control is."""
    rule = ALGORITHMS.find("scaffold")(parts(world(), STEPS), option="I").train.rule
    made = ALGORITHMS.find("fedir")(parts(world(), STEPS, client=rule))
    agree(made, world())
    monkeypatch.setattr(Steps, "_modified_each", lambda *given: pytest.fail("one by one"))
    course(made, world(), 2, engine=vectorized())
