"""The gate: one answer to a request, states committed on acceptance, everything counted."""

from collections.abc import Iterator

import pytest
import torch

from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import Ask, ClientStates, Failure, Id, Reply, Request


class Scripted:
    """An engine that answers as it is told, and remembers what was closed."""

    def __init__(self, *exchanges) -> None:
        self.exchanges = list(exchanges)
        self.closed = 0

    def answer(self, ask: Ask, round: int, exchange: int) -> Iterator:
        try:
            yield from self.exchanges[exchange]
        finally:
            self.closed += 1


def reply(slot: int, client, exchange: int = 0, state=None, round: int = 1, **payload) -> Reply:
    metrics = {"loss": 2.0, "examples": 3, "batches": slot + 1}
    return Reply(Id(round, exchange, slot), client, payload, metrics, state, nbytes=10)


def taking(ask: Ask, refuse=(), stop_after: int | None = None):
    taken = []
    answers = yield ask
    for answer in answers:
        if isinstance(answer, Reply) and answer.client in refuse:
            answer.refuse("not wanted")
        else:
            taken.append(answer.client)
        if stop_after is not None and len(taken) == stop_after:
            break
    return taken


def ask(*clients, **kwargs) -> Ask:
    return Ask("op", [Request(c) for c in clients], **kwargs)


def test_a_second_answer_to_a_request_is_refused_and_counted() -> None:
    gate = Driver(
        Scripted([reply(0, 5, state={"n": 1}), reply(0, 5, state={"n": 2}), reply(1, 6)]), ClientStates()
    )
    assert gate.drive(taking(ask(5, 6)), 1) == [5, 6]
    assert gate.tally.failures[5] == {"answered a request twice, or one that was not asked": 1}
    assert (gate.tally.clients, gate.tally.failed) == (2, 1)
    assert gate.states.get(5) == {"n": 1}


@pytest.mark.parametrize("wrong", [Id(1, 0, 7), Id(0, 0, 1), Id(1, 1, 1)])
def test_an_answer_to_what_was_not_asked_is_refused(wrong: Id) -> None:
    stray = Reply(wrong, 6, {}, {}, {"n": 9})
    gate = Driver(Scripted([reply(0, 5), stray]), ClientStates())
    assert gate.drive(taking(ask(5, 6)), 1) == [5]
    assert gate.tally.failed == 1
    assert gate.states.get(6) == {}


def test_states_are_committed_on_acceptance_alone() -> None:
    states = ClientStates()
    states.commit(2, {"n": 0})
    failure = Failure(Id(1, 0, 1), 1, "it broke")
    engine = Scripted([reply(0, 0, state={"n": 1}), failure, reply(2, 2, state={"n": 1}), reply(3, 3)])
    gate = Driver(engine, states)
    assert gate.drive(taking(ask(0, 1, 2, 3), refuse=(2,)), 1) == [0, 1, 3]
    assert states.snapshot() == {0: {"n": 1}, 2: {"n": 0}}
    assert {k: dict(v) for k, v in gate.tally.failures.items()} == {1: {"it broke": 1}, 2: {"not wanted": 1}}


def test_states_are_seen_as_they_were_when_it_was_asked() -> None:
    states, seen = ClientStates(), []

    class Looking(Scripted):
        def answer(self, ask, round, exchange):
            for answer in self.exchanges[exchange]:
                seen.append(dict(states.get(answer.client)))
                yield answer

    engine = Looking([reply(0, 5, state={"n": 1}), reply(1, 5, state={"n": 2})])
    Driver(engine, states).drive(taking(ask(5, 5)), 1)
    assert seen == [{}, {}]
    assert states.get(5) == {"n": 2}  # the later slot's stays


def test_in_arrival_order_a_state_is_committed_at_once() -> None:
    states, seen = ClientStates(), []

    class Looking(Scripted):
        def answer(self, ask, round, exchange):
            for answer in self.exchanges[exchange]:
                seen.append(dict(states.get(answer.client)))
                yield answer

    engine = Looking([reply(0, 5, state={"n": 1}), reply(1, 5, state={"n": 2})])
    Driver(engine, states).drive(taking(ask(5, 5, order="arrival")), 1)
    assert seen == [{}, {"n": 1}]


def test_replies_that_were_not_taken_commit_nothing() -> None:
    engine = Scripted([reply(slot, slot, state={"n": 1}) for slot in range(4)])
    states = ClientStates()
    assert Driver(engine, states).drive(taking(ask(0, 1, 2, 3), stop_after=2), 1) == [0, 1]
    assert set(states.snapshot()) == {0, 1}
    assert engine.closed == 1


def test_several_exchanges_and_their_value() -> None:
    def steps():
        first = [a.client for a in (yield ask(1, 2))]
        second = [a.id.exchange for a in (yield ask(3))]
        return first + second

    engine = Scripted([reply(0, 1), reply(1, 2)], [reply(0, 3, exchange=1)])
    assert Driver(engine, ClientStates()).drive(steps(), 1) == [1, 2, 1]
    assert engine.closed == 2


def test_an_error_in_the_algorithm_closes_the_engines_answers() -> None:
    def steps():
        for _ in (yield ask(1, 2)):
            raise ArithmeticError("no")

    engine = Scripted([reply(0, 1), reply(1, 2)])
    with pytest.raises(ArithmeticError):
        Driver(engine, ClientStates()).drive(steps(), 1)
    assert engine.closed == 1


def test_an_algorithm_that_asks_nothing_is_driven_too() -> None:
    def steps():
        return 7
        yield

    assert Driver(Scripted(), ClientStates()).drive(steps(), 1) == 7


def test_the_tally_adds_up_and_leaves_the_server_out() -> None:
    shared = {"model": {"w": torch.zeros(5)}}  # 20 bytes
    asked = Ask("op", [Request(0, {"work": 1}), Request(1), Request("@test")], shared)
    held = Reply(Id(1, 0, 2), "@test", {}, {"loss": 100.0}, None, 50)
    gate = Driver(Scripted([reply(0, 0), reply(1, 1), held]), ClientStates())
    gate.drive(taking(asked), 1)
    tally = gate.tally
    assert (tally.bytes_down, tally.bytes_up) == (20 + 8 + 20, 20)
    assert (tally.clients, tally.batches_max) == (2, 2)
    assert dict(tally.sums) == {"loss": 4.0, "examples": 6.0, "batches": 3.0}
    assert [row["client"] for row in tally.per_client] == [0, 1]


def test_training_at_the_server_counts_as_work_but_not_as_traffic() -> None:
    gate = Driver(Scripted([reply(0, "@train")]), ClientStates())
    gate.drive(taking(Ask("op", [Request("@train")], {"w": torch.zeros(5)})), 1)
    assert (gate.tally.clients, gate.tally.bytes_up, gate.tally.bytes_down) == (1, 0, 0)
    assert gate.tally.sums["examples"] == 3


def test_a_client_that_replies_twice_is_one_client_and_its_batches_add_up() -> None:
    tally = Tally()
    for slot, batches in enumerate((3, 4)):
        tally.accepted(ask(), Reply(Id(1, 0, slot), 7, {}, {"batches": batches}))
    tally.accepted(ask(), Reply(Id(1, 0, 2), 8, {}, {"batches": 5}))
    assert (tally.replies, tally.clients, tally.batches_max) == (3, 2, 7)


def test_measuring_adds_bytes_and_failures_and_no_training() -> None:
    tally, measuring = Tally(), Tally()
    tally.accepted(ask(), Reply(Id(1, 0, 0), 7, {}, {"loss": 2.0, "examples": 1}, nbytes=10))
    measuring.accepted(ask(), Reply(Id(1, 1, 0), 7, {}, {"loss": 5.0, "examples": 9}, nbytes=100))
    measuring.failure(8, "no reply")
    tally.add_evaluation(measuring)
    assert (tally.bytes_up, tally.failed, tally.failures[8]["no reply"]) == (110, 1, 1)
    assert (tally.sums["loss"], tally.sums["examples"]) == (2.0, 1.0)


def test_an_ask_of_the_servers_data_after_training_leaves_the_clients_counted() -> None:
    held = Reply(Id(1, 1, 0), "@validation", {}, {"gain": 0.5, "loss": 9.0})
    gate = Driver(Scripted([reply(0, 0), reply(1, 1)], [held]), ClientStates())

    def steps():
        list((yield ask(0, 1)))
        list((yield ask("@validation")))

    gate.drive(steps(), 1)
    assert (gate.tally.clients, gate.tally.failed) == (2, 0)
    assert gate.tally.sums["gain"] == 0.5
    assert gate.tally.sums["loss"] == 4.0


def test_an_ask_without_requests_in_request_order_reaches_no_engine_and_is_no_message() -> None:
    gate = Driver(Scripted(), ClientStates())
    assert gate.drive(taking(ask()), 1) == []
    assert gate.tally.traffic.to_payload() == Tally().traffic.to_payload()
