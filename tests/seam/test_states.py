"""Client states: each client keeps its own, and all requests of an ask see what was committed before it."""

import pytest
import torch

from fedlens.core.protocol import Ask, Client, Outcome, Payload, Reduce, Reply, Request
from fedlens.core.seeding import Rng
from tests.seam.seam_kit import ENGINES, gate


def reuse(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Answers with the same memory every time, as an operation does that hands out its module's parameters."""
    own = client.scratch.setdefault("own", torch.zeros(3))
    own.fill_(float(client.id))
    return Outcome({"x": {"w": own}, "extra": own, "weight": 1.0}, {"own": own})


def count(payload: Payload, client: Client, rng: Rng) -> Outcome:
    return Outcome({"seen": client.state.get("times", 0)}, {"times": client.state.get("times", 0) + 1})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("block", [0, 1, 3])
def test_each_client_keeps_its_own(engine: str, block: int) -> None:
    reduce = Reduce({"x": "sum"}, block=block) if block else None

    def steps():
        return list((yield Ask("reuse", [Request(k) for k in range(8)], reduce=reduce)))

    with gate(engine, {"reuse": reuse}) as g:
        answers = g.drive(steps(), 1)
        assert [g.states.get(k)["own"].tolist() for k in range(8)] == [[float(k)] * 3 for k in range(8)]
    assert [answer.payload["extra"][0].item() for answer in answers] == list(range(8))
    if block:
        folded = [answer.folded for answer in answers if answer.folded is not None]
        assert sum(part["x"]["w"][0].item() for part in folded) == sum(range(8))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["request", "arrival"])
def test_an_ask_sees_the_states_from_before_it(engine: str, order: str) -> None:
    def steps():
        seen = []
        for _ in range(2):
            answers = yield Ask("count", [Request(0), Request(0), Request(1), Request(0)], order=order)
            seen.append([a.payload["seen"] for a in answers if isinstance(a, Reply)])
        return seen

    with gate(engine, {"count": count}) as g:
        assert g.drive(steps(), 1) == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_an_ask_in_arrival_order_is_not_reduced() -> None:
    with pytest.raises(ValueError, match="arrival order"):
        Ask("train", [Request(0)], order="arrival", reduce=Reduce({"x": "sum"}))
