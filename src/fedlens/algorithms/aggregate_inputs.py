"""Checks that an aggregate leaves the replies that it aggregates as they are, in the first rounds."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

from fedlens.aggregate.mean import Aggregate
from fedlens.core.errors import HookError
from fedlens.core.input_checks import FIRST_VISITS, INSTEAD, PassedInputs
from fedlens.core.protocol import Answer, Answers, Ask, Reply
from fedlens.core.reduction import How
from fedlens.core.signatures import place_of


def exchanged(
    aggregate: Aggregate, ask: Ask, fields: Mapping[str, How], round: int
) -> Generator[Ask, Answers, Any]:
    """The asks of `aggregate.exchange` and what it returns.

    Raises `HookError` if a reply has changed when it returns. Later readers of the replies, such as recordings and
    server rules, would see other numbers.
    """
    steps: Any = aggregate.exchange(ask, fields)
    if round > FIRST_VISITS or not isinstance(steps, Generator):
        return (yield from steps)
    passed = PassedInputs()
    try:
        asked = next(steps)
        while True:
            asked = steps.send(_noted((yield asked), passed))
    except StopIteration as end:
        changed = passed.changed()
        if changed is not None:
            method = aggregate.fold if type(aggregate).exchange is Aggregate.exchange else aggregate.exchange
            who = f"`{method.__name__}` of {type(aggregate).__name__}"
            what = f"{who} changes its input {changed} in place"
            raise HookError(what, where=place_of(method), hint=INSTEAD) from None
        return end.value
    finally:
        steps.close()


def _noted(answers: Answers, passed: PassedInputs) -> Iterator[Answer]:
    """The answers. Partial sums of workers are left out: they are added up in their own memory."""
    for answer in answers:
        if isinstance(answer, Reply) and answer.folded is None:
            passed.add(f"answers[{answer.client!r}].payload", answer.payload)
        yield answer
        del answer  # frees its tree before the next answer comes
