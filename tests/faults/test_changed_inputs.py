"""Changes of inputs are found however they are written."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlens.aggregate.mean import Aggregate
from fedlens.algorithms.component_calls import begun_by, exchanged, prepared_by, shared_by, updated_by
from fedlens.base.errors import HookError
from fedlens.core.input_checks import FIRST_VISITS, PassedInputs
from fedlens.core.protocol import Ask, Reply, RoundContext
from fedlens.core.reduction import Update
from fedlens.local.hook_checks import watched_rule
from fedlens.local.rules import ClientRule, LocalContext, ServerRule


def no_grad(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def replaced(tensor: Tensor) -> None:
    tensor.data = tensor.detach() + 1


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda tensor: tensor.data.add_(1),
    "another .data": replaced,
    "detach": lambda tensor: tensor.detach().add_(1),
    "numpy": lambda tensor: np.add(tensor.detach().numpy(), 1, out=tensor.detach().numpy()),
    "no_grad": no_grad,
    "another order": lambda tensor: tensor.detach().numpy().sort(),
}


def tensor() -> Tensor:
    return torch.tensor([3.0, 1.0, 2.0], requires_grad=True)


FORMS: dict[str, Callable[[], Tensor]] = {
    "one value": lambda: torch.tensor(1.0),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "expanded": lambda: torch.ones(1).expand(3),
    "transposed": lambda: torch.ones(2, 3).T,
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_all_forms_are_compared(form: str) -> None:
    passed, value = PassedInputs(), FORMS[form]()
    passed.add("sent", value)
    assert passed.changed() is None
    (value.data[..., :1] if value.dim() else value.data).add_(1)
    assert passed.changed() == "sent"


def context() -> LocalContext:
    made = LocalContext(["w"], [tensor().detach()], {"sent": tensor().detach()}, {}, 0.1, 1)
    made.batch, made.at_anchor = (tensor().detach(), tensor().detach()), [tensor().detach()]
    return made


def changing(at: int, change: Callable[[Tensor], Any], returns: Any) -> Callable[..., Any]:
    """A hook that changes the first tensor of its argument number `at`."""

    def hook(*given: Any) -> Any:
        value = given[at]
        change(value[0] if isinstance(value, list) else value)
        return returns(given)

    return hook


# The hook, the argument that it changes, what it returns, and its arguments.
CLIENT: dict[str, tuple[str, int, Callable[[Any], Any], Callable[[], list[Any]]]] = {
    "outputs": ("loss", 1, lambda given: given[0], lambda: [tensor().sum(), tensor(), tensor().detach()]),
    "targets": ("risk", 1, lambda given: given[0].sum(), lambda: [tensor(), tensor().detach()]),
    "gradients[0]": ("grad", 0, lambda given: given[0], lambda: [[tensor().detach()], [tensor().detach()]]),
    "parameters[0]": ("grad", 1, lambda given: given[0], lambda: [[tensor().detach()], [tensor().detach()]]),
    "finish": ("finish", 0, lambda given: ({}, None), lambda: [[tensor().detach()]]),
}


def hook_of(name: str, wrong: Callable[..., Any]) -> ClientRule:
    hooks: dict[str, Callable[..., Any]] = {
        "loss": lambda loss, outputs, targets, context: wrong(loss, outputs, targets, context),
        "risk": lambda outputs, targets, context: wrong(outputs, targets, context),
        "grad": lambda gradients, parameters, context: wrong(gradients, parameters, context),
        "finish": lambda parameters, context: wrong(parameters, context),
    }
    return ClientRule(name="mine", **{name: hooks[name]})  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("argument", CLIENT)
def test_a_client_rule_that_changes_an_argument_is_named(argument: str, way: str) -> None:
    name, at, returns, arguments = CLIENT[argument]
    rule = watched_rule(hook_of(name, changing(at, WAYS[way], returns)))
    shown = "parameters[0]" if argument == "finish" else argument
    with pytest.raises(HookError) as caught:
        vars(rule)[name](*arguments(), context())
    assert str(caught.value).startswith(
        f"`{name}` of the client rule 'mine' changes its input {shown} in place"
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", ["at_anchor[0]", "batch[1]"])
def test_a_client_rule_that_changes_what_a_step_has_is_named(part: str, way: str) -> None:
    def grad(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
        WAYS[way](context.batch[1] if part == "batch[1]" else context.at_anchor[0])
        return gradients

    rule = watched_rule(ClientRule(name="mine", grad=grad))
    assert rule.grad is not None
    with pytest.raises(HookError) as caught:
        rule.grad([tensor().detach()], [tensor().detach()], context())
    assert f"changes its input context.{part} in place" in str(caught.value)


def ctx(round: int = 1) -> RoundContext:
    return RoundContext(round, 9, None, None)  # type: ignore[arg-type]


class Writing(Aggregate):
    """Changes the replies, once it has all of them."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        self.change = change

    def aggregate(self, answers: Any, fields: Any, ctx: Any) -> Update:
        replies = list(answers)
        for reply in replies:
            self.change(reply.payload["update"]["w"])
        return Update(replies[0].payload["update"], {}, {}, {}, len(replies), 1.0)


def aggregated(change: Callable[[Tensor], Any], round: int = 1) -> None:
    replies = [Reply(client, client, {"update": {"w": tensor().detach()}}) for client in (7, 8)]
    steps = exchanged(Writing(change), Ask("train", [], {}), ClientRule(), ctx(round), {})
    next(steps)
    with pytest.raises(StopIteration):
        steps.send(iter(replies))


def called(hook: str, change: Callable[[Tensor], Any]) -> None:
    """Calls a hook of a server rule that makes the change to its state, or of `init` to the weights."""
    state, update = {"w": tensor().detach()}, Update({"w": tensor().detach()}, {}, {}, {}, 1, 1.0)

    def changed(given: Any) -> Any:
        change(given["w"])
        return {}

    match hook:
        case "init":
            begun_by("mine", ServerRule(init=lambda weights, federation: changed(weights)), state, None)  # type: ignore[arg-type]
        case "shared":
            shared_by("mine", ServerRule(shared=changed), state, {}, ctx())
        case "prepare":

            def prepare(state: Any, shared: Any, cohort: Any, ctx: Any) -> Generator[Any, Any, Any]:
                changed(shared["model"])
                yield None
                return state

            steps = prepared_by("mine", ServerRule(prepare=prepare), {}, {"model": state}, [], ctx())
            next(steps)
            steps.send(iter(()))
        case "after":
            half = ServerRule(after=lambda state, update, ctx: (changed(update.update), update))
            updated_by("mine", half, state, update, ctx())


SERVER = {
    "init": "weights['w']",
    "shared": "state['w']",
    "prepare": "shared['model']['w']",
    "after": "update['w']",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", SERVER)
def test_a_server_rule_that_changes_an_input_is_named(hook: str, way: str) -> None:
    with pytest.raises(HookError) as caught:
        called(hook, WAYS[way])
    said = f"`{hook}` of the server rule 'mine' changes its input {SERVER[hook]} in place"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("way", WAYS)
def test_an_aggregate_that_changes_a_reply_is_named(way: str) -> None:
    with pytest.raises(HookError) as caught:
        aggregated(WAYS[way])
    said = "`aggregate` of Writing changes its input answers[7].payload['update']['w'] in place (test_changed_inputs.py"
    assert str(caught.value).startswith(said)


def test_replies_are_not_kept_in_memory_and_not_compared_after_the_first_rounds() -> None:
    aggregated(lambda tensor: None)
    aggregated(WAYS["data"], FIRST_VISITS + 1)
    passed, update = PassedInputs(), tensor()
    passed.add("update", update)
    gone = weakref.ref(update)
    del update
    assert gone() is None
    assert passed.changed() is None
