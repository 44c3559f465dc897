"""How the parties of vertical learning find the examples that all of them have: the asks of `Align`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedlens.base.errors import RunFailed
from fedlens.core.dataset_info import PartyFacts
from fedlens.core.protocol import Ask, Reply, Request, Steps
from fedlens.core.schema import NumberField, Schema, TensorField
from fedlens.local.set_intersection import POINT


def aligned(facts: PartyFacts, parties: Sequence[int], largest: int) -> Steps:
    """Finds the examples that all parties have; returns their number, or 0 if a party failed.

    Args:
        parties: those that take part.
        largest: the number of examples of the largest party.

    Raises `RunFailed` for repeated ids, and if there is no such example.
    """
    everyone = [Request(k) for k in parties]
    at_others = [request for request in everyone if request.client != facts.labels_at]
    points = TensorField((-1, POINT), torch.uint8, most=POINT * largest)
    lists, found = Schema({"points": points}), NumberField(above=-1)
    ask = Ask("mask", everyone, {}, Schema({"repeated": found}), letter=lists, counts=False)
    answers = list((yield ask))
    for answer in answers:
        if isinstance(answer, Reply) and (repeated := int(answer.payload["repeated"])):
            raise RunFailed(
                f"{repeated:,} examples of party '{facts.names[int(answer.client)]}' repeat the id of another",
                hint="give each example of a party an id of its own",
            )
    if not all(isinstance(answer, Reply) for answer in answers):
        return 0
    if facts.align == "psi":
        ask = Ask("remask", everyone, letter=lists, expect=Schema({}), deliver=True, counts=False)
        if any(not isinstance(answer, Reply) for answer in list((yield ask))):
            return 0
    places = TensorField((-1,), torch.int64, 0, most=8 * largest)
    letter, expect = Schema({"places": places}), Schema({"shared": found})
    ask = Ask("match", [Request(facts.labels_at)], expect=expect, letter=letter, deliver=True, counts=False)
    (answer,) = yield ask
    if not isinstance(answer, Reply):
        return 0
    if not (shared := int(answer.payload["shared"])):
        raise RunFailed(
            "no example is held by all parties: their ids have nothing in common",
            hint="check that all parties write ids in the same way",
        )
    if at_others:
        ask = Ask("keep", at_others, expect=Schema({}), deliver=True, counts=False)
        if any(not isinstance(answer, Reply) for answer in list((yield ask))):
            return 0
    return shared
