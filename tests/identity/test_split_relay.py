"""Split learning in turn: what has to be equal to what, against a bare loop over the batches that the run drew."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Everyone, Fixed, Uniform
from fedlens.algorithms.split_relay import SplitRelay, split_relay
from fedlens.core.protocol import Client, Outcome, Payload
from fedlens.core.random import Rng
from fedlens.engines.processes import processes
from fedlens.local.halves import Hand
from tests.identity.identity_kit import CLASSES, FEATURES, Course, World, close, course, parts, same
from tests.identity.test_splitfed import (
    CUTS,
    SGD,
    TWO_CUTS,
    Uncached,
    bare,
    deep,
    drawn_by,
    of_client,
    recorded,
    spec,
)

Batches = list[tuple[Tensor, Tensor]]


def relay(there: World, select: Any = None, **more: Any) -> SplitRelay:
    made = parts(there, more.pop("local", SGD), more.pop("model", spec()), select=select or Everyone())
    return split_relay(made, **{"cut": "1", **more})


def turns(there: World, round: int) -> list[Batches]:
    """The batches of a round in the order in which they were first drawn, one list a client."""
    clients = dict.fromkeys(int(key[1]) for key in drawn_by(there) if key[0] == round)
    return [of_client(there, round, client) for client in clients]


def apart(
    tree: Any,
    turns: Sequence[Batches],
    rate: float = 0.2,
    lost: Collection[int] = (),
    passes: bool = True,
) -> dict[str, Tensor]:
    """The state_dict after these turns in bare PyTorch, cut after layer 1; each client begins a new optimizer.

    The lower half that comes out of the turns `lost` is dropped. Without `passes` each client begins with the first.
    """
    module = deep((FEATURES,), CLASSES)
    module.load_state_dict(dict(tree))
    upper = torch.optim.SGD(module[4:].parameters(), lr=rate, momentum=0.5)
    for at, batches in enumerate(turns):
        if not passes:
            module.load_state_dict({n: tree[n] for n in tree if int(n[0]) < 4}, strict=False)
        before = {n: v.clone() for n, v in module[:4].state_dict().items()}
        lower = torch.optim.SGD(module[:4].parameters(), lr=0.2, momentum=0.5)
        for inputs, targets in batches:
            module.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            lower.step()
            upper.step()
        if at in lost:
            module[:4].load_state_dict(before)
    return {n: v.detach().clone() for n, v in module.state_dict().items()}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("select", [Fixed((3, 0, 2)), Uniform(2)], ids=["fixed", "uniform"])
def test_with_the_optimizer_it_is_centralized_sgd_with_momentum_in_visiting_order(
    cut: str, select: Any
) -> None:
    there = recorded()
    run = course(relay(there, select, cut=cut), there, 3)
    optimizer, orders = None, set()
    for step in run.steps:
        order = [key[1] for key in drawn_by(there) if key[0] == step.round]
        orders.add(tuple(dict.fromkeys(order)))
        batches = [batch for turn in turns(there, step.round) for batch in turn]
        assert len(batches) > 4
        expected, optimizer = bare(step.before["model"], batches, optimizer)
        close(step.after["model"], expected)
    assert orders == {(3, 0, 2)} if isinstance(select, Fixed) else len(orders) > 1


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_without_the_optimizer_each_client_begins_a_new_one_and_the_server_has_its_own_rate(
    rate: float,
) -> None:
    there = recorded()
    run = course(relay(there, carry_optimizer=False, server_rate=rate), there, 1)
    close(run.final, apart(run.steps[0].before["model"], turns(there, 1), 0.2 * rate))


@pytest.mark.parametrize("cuts", TWO_CUTS)
@pytest.mark.parametrize("carry", [True, False])
def test_two_cuts_are_one_cut(cuts: tuple[str, str], carry: bool) -> None:
    # Without carrying, each client begins a new optimizer for its last layers too, which matters with momentum.
    there, local = recorded(), SGD if carry else {**SGD, "momentum": 0.0}
    made = [relay(there, carry_optimizer=carry, cut=cut, local=local) for cut in (cuts, cuts[0])]
    runs = [course(each, there, 2) for each in made]
    close(runs[0].final, runs[1].final)


def test_the_weights_pass_with_the_turn() -> None:
    """Public code passes the turn alone, so that each client goes on from the weights that it began with."""
    there = recorded()
    run = course(relay(there, carry_optimizer=False), there, 1)
    before = run.steps[0].before["model"]
    alone = apart(before, turns(there, 1), passes=False)
    close(run.final, apart(before, turns(there, 1)))
    assert not any(torch.allclose(run.final[n], alone[n]) for n in alone if n.endswith("weight"))


def test_a_client_that_gets_no_weights_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    there = recorded()
    monkeypatch.setattr(Hand, "__call__", lambda self, payload, client, rng: Outcome({}))
    run = course(relay(there, Fixed((3, 0))), there, 1)
    assert dict(run.steps[0].tally.failures[0]) == {"ValueError: step 0 has no weights to start from": 1}


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_client_that_fails_in_its_turn_leaves_the_lower_half_as_without_it(at: int) -> None:
    order = (3, 0, 2)
    there = recorded(failing=(1, order[at], 2))
    run = course(relay(there, Fixed(order), carry_optimizer=False), there, 1)
    close(run.final, apart(run.steps[0].before["model"], turns(there, 1), lost={at}))
    assert list(run.steps[0].tally.failures) == [order[at]]
    assert [len(batches) for batches in turns(there, 1)].count(2) == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_if_a_client_cannot_hand_on_the_one_before_it_does(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order = (3, 0, 2)
    hand = Hand.__call__

    def lost(self: Hand, payload: Payload, client: Client, rng: Rng) -> Outcome:
        if client.id == order[at]:
            raise ConnectionError("no answer")
        return hand(self, payload, client, rng)

    monkeypatch.setattr(Hand, "__call__", lost)
    there = recorded()
    run = course(relay(there, Fixed(order), carry_optimizer=False), there, 1)
    close(run.final, apart(run.steps[0].before["model"], turns(there, 1), lost={at}))


CHOSEN: dict[str, Any] = {"model": spec(dropout=0.3), "select": Uniform(3)}


def test_without_the_cache_a_run_has_the_same_bits() -> None:
    there, forgetful = recorded(), relay(recorded(), **CHOSEN)
    object.__setattr__(forgetful, "lower", Uncached(**vars(forgetful.lower)))
    assert same(course(relay(there, **CHOSEN), there, 2).final, course(forgetful, there, 2).final)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_on_two_workers_a_run_has_the_same_bits(optimizer: str) -> None:
    there, local = recorded(), {"lr": 0.1, "epochs": 1, "batch_size": 4, "optimizer": optimizer}
    made = relay(there, local=local, **CHOSEN)
    apart = Course(made, there, engine=processes(workers=2)).run(3)
    assert same(course(made, there, 3).final, apart.final)


def test_no_client_keeps_a_half_after_the_round() -> None:
    there = recorded(failing=(1, 2, 1))
    run = course(relay(there), there, 2)
    assert [run.states.get(client) for client in range(5)] == [{}] * 5
    assert run.states.get("@server").keys() == {"optimizer"}
