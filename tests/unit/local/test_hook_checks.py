"""What is compared around the hooks of a client rule, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.base.errors import HookError
from fedlens.core import input_checks
from fedlens.core.input_checks import FIRST_VISITS
from fedlens.local import hook_checks
from fedlens.local.chain import chain
from fedlens.local.rules import ClientRule, LocalContext
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train

Hook = Callable[..., Any]


def context() -> LocalContext:
    return LocalContext(
        ["w"], [torch.ones(3)], {"model": {"w": torch.ones(3)}}, {"c": torch.zeros(3)}, 0.1, 1
    )


def grad(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
    return gradients


def behind(gradients: list[Tensor], parameters: list[Tensor], context: LocalContext) -> list[Tensor]:
    """Changes the anchor where no version shows it."""
    context.anchor[0].data[1] = 5.0
    return gradients


def visit(rule: ClientRule, steps: int = 4, scratch: dict[Any, Any] | None = None) -> None:
    train = Train(None, None, LocalSettings(lr=0.1), rule)  # type: ignore[arg-type]
    given, one = context(), [torch.ones(3)]
    with hook_checks.watching(train, {} if scratch is None else scratch) as watched:
        if watched.rule.start is not None:
            watched.rule.start(given)
        for _ in range(steps):
            given.at_anchor = [torch.ones(3)]
            assert watched.rule.grad is not None
            watched.rule.grad(one, one, given)


def test_contents_are_read_in_few_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = input_checks.checksums
    monkeypatch.setattr(input_checks, "checksums", lambda ts: (read.extend(range(len(ts))), real(ts))[1])
    for steps, calls in ((1, 1), (9, 4), (1000, 10)):
        read.clear()
        visit(ClientRule(name="mine", grad=grad), steps)
        # The anchor, the payload and the state once, and the step's tensors in the calls 1, 2, 4, 8 and so on.
        assert len(read) == 2 * (3 + calls * 2)


def test_a_change_that_no_version_shows_names_the_only_hook() -> None:
    with pytest.raises(
        HookError, match=r"^`grad` of the client rule 'mine' changes its input context.anchor\[0\]"
    ) as e:
        visit(ClientRule(name="mine", grad=behind))
    assert "test_hook_checks.py, line" in str(e.value)


def test_a_change_that_no_version_shows_names_all_hooks_that_ran() -> None:
    rule = chain(
        ClientRule(name="mine", grad=behind), ClientRule(name="other", grad=grad, start=lambda context: None)
    )
    names = "`start` of the client rule 'other', `grad` of the client rule 'mine' or `grad` of the client rule 'other'"
    with pytest.raises(HookError) as caught:
        visit(rule)
    assert str(caught.value).startswith(
        f"{names} changes its input context.anchor[0] in place; return a new tensor"
    )


def test_a_change_that_a_version_shows_names_its_hook_at_once() -> None:
    seen: list[str] = []

    def adds(context: LocalContext) -> None:
        context.state["c"].add_(1)

    rule = ClientRule(name="mine", start=adds, grad=lambda g, w, context: (seen.append("grad"), g)[1])
    with pytest.raises(
        HookError, match=r"^`start` of the client rule 'mine' changes its input context.state\['c'\]"
    ):
        visit(rule)
    assert seen == []


def test_after_the_first_visits_nothing_is_compared() -> None:
    scratch: dict[Any, Any] = {}
    rule = ClientRule(name="mine", grad=grad)
    train = Train(None, None, LocalSettings(lr=0.1), rule)  # type: ignore[arg-type]
    for at in range(FIRST_VISITS + 1):
        with hook_checks.watching(train, scratch) as watched:
            assert (watched is train) == (at == FIRST_VISITS)
