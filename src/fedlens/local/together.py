"""Several clients' local training as one computation: their weights stacked along an axis of clients.

What comes out agrees with one client after the other to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedlens.core.errors import told
from fedlens.core.modules import loadable
from fedlens.core.protocol import Call, Outcome
from fedlens.core.rows import Stacked
from fedlens.local.rules import Solved, Visit
from fedlens.local.stacked_layers import DROPOUTS
from fedlens.local.stacked_model import StackedModel
from fedlens.local.stacked_steps import Steps

if TYPE_CHECKING:
    from fedlens.local.training import Train


@dataclass
class _Member:
    """A client of the group: where it stands in the calls, and what the rule's hooks see there."""

    at: int
    call: Call
    visit: Visit
    masks: torch.Generator | None


def train_together(train: Train, calls: Sequence[Call]) -> list[Outcome | Exception]:
    """Local training of several clients, as `Train` does it for one.

    Where a client fails by itself its place holds the exception. Raises whatever the common computation raises.
    """
    kinds: dict[Any, list[int]] = {}
    for at, call in enumerate(calls):
        kinds.setdefault((id(call.payload.get("model")), call.payload.get("lr")), []).append(at)
    if len(kinds) > 1:  # what a request brings itself, a model or a rate, is that client's alone
        found: dict[int, Outcome | Exception] = {}
        for kind in kinds.values():
            found |= dict(zip(kind, train_together(train, [calls[at] for at in kind]), strict=True))
        return [found[at] for at in range(len(calls))]
    results: dict[int, Outcome | Exception] = {}
    with ExitStack() as closing:
        client = calls[0].client
        learner = loadable(train.model, client.scratch, client.device)
        learner.load(calls[0].payload["model"])
        model = StackedModel(learner, client.scratch)
        random = any(isinstance(m, DROPOUTS) and m.p > 0 for m in learner.module.modules())
        members: list[_Member] = []
        for at, call in enumerate(calls):
            try:
                members.append(_begun(train, at, call, closing, random))
            except (Exception, SystemExit) as error:
                results[at] = _failure(error)
        if members:
            members.sort(key=lambda member: -member.visit.steps)
            _train(train, model, members, results)
    return [results[at] for at in range(len(calls))]


def _train(
    train: Train, model: StackedModel, members: Sequence[_Member], results: dict[int, Outcome | Exception]
) -> None:
    visits = [member.visit for member in members]
    rngs, masks = [member.call.rng for member in members], [member.masks for member in members]
    trained, losses = Steps(train, model, visits, rngs, masks).run()
    moved = [anchor - now for anchor, now in zip(visits[0].anchor, trained, strict=True)]
    updates = Stacked(dict(zip(visits[0].names, moved, strict=True))).rows()
    # Cut for those alone who look at them.
    ends = list(zip(*trained, strict=True)) if train.rule.finish is not None else [()] * len(members)
    for member, loss, end, update in zip(members, losses, ends, updates, strict=True):
        solved = Solved([], loss[0], loss[1], member.visit.steps)
        try:
            results[member.at] = train.outcome(member.call.client, member.visit, list(end), update, solved)
        except (Exception, SystemExit) as error:
            results[member.at] = _failure(error)


def _failure(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(told(error))


def _begun(train: Train, at: int, call: Call, closing: ExitStack, random: bool) -> _Member:
    if random or train.rule.start is not None:
        torch.default_generator.manual_seed(call.rng.seed("torch"))
    visit = train.visit(call.payload, call.client, call.rng, closing, load=False)
    if train.rule.start is not None:
        train.rule.start(visit)
    masks = None
    if random:  # masks come from where the client's own generator would stand
        masks = torch.Generator()
        masks.set_state(torch.get_rng_state())
    return _Member(at, call, visit, masks)
