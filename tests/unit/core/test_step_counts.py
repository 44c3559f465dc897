from __future__ import annotations

from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, ClientStates, Failure, Id, Reply, Request
from fedlens.core.step_counts import StepCount, Work, steps_of


def test_an_answer_counts_as_much_as_its_clients_work() -> None:
    work = Work(weigh=lambda clients: [float(client) for client in clients])
    work.ask([6, 3, 1])
    seen = [work.fraction]
    for _ in range(3):
        work.answer()
        seen.append(work.fraction)
    assert seen == [0.0, 0.6, 0.9, 1.0]


def test_the_steps_of_a_client_that_has_not_answered_count() -> None:
    count = StepCount(clients=7, together=1, steps=2, done=2)  # of earlier rounds
    work = Work(count=lambda: count)
    work.ask(range(4))
    assert work.fraction == 0.0
    count.begin(steps=10)
    count.done += 5
    assert work.fraction == 0.125
    work.answer()  # it had fewer steps than planned
    assert work.fraction == 0.25
    count.begin(steps=10)
    assert work.fraction == 0.25
    count.done += 5
    assert work.fraction == 0.375


def test_the_steps_of_a_group_count_for_each_of_its_clients() -> None:
    count = StepCount()
    work = Work(count=lambda: count)
    work.ask(range(10))
    count.begin(steps=4, clients=8)
    count.done += 1
    assert work.fraction == 0.2
    for _ in range(8):
        work.answer()
    count.begin(steps=4, clients=2)
    count.done += 2
    assert work.fraction == 0.9


def test_more_steps_than_planned_are_not_more_than_all() -> None:
    count = StepCount()
    work = Work(count=lambda: count)
    work.ask(range(2))
    for _ in range(5):  # tried again and again
        count.begin(steps=1)
        count.done += 3
    assert work.fraction == 1.0


def test_clients_without_work_and_no_clients_divide_by_nothing() -> None:
    work = Work(weigh=lambda clients: [0.0 for _ in clients])
    work.ask([])
    assert work.fraction == 0.0
    work.ask([1, 2])
    work.answer()
    assert work.fraction == 0.5


def test_without_an_engine_that_counts_the_steps_are_nobodys() -> None:
    assert steps_of({}) is not steps_of({})
    count = StepCount()
    assert steps_of({StepCount: count}) is count


def test_the_driver_counts_failures_and_refused_replies_too() -> None:
    class Engine:
        def answer(self, ask, round, exchange):
            for slot, request in enumerate(ask.requests):
                if slot == 1:
                    yield Failure(Id(round, exchange, slot), request.client, "broken")
                else:
                    yield Reply(Id(round, exchange, slot), request.client, {})
                yield Reply(Id(round, exchange, slot), request.client, {})  # a second answer does not count

    seen = []

    def two_exchanges():
        for answer in (yield Ask("a", [Request(k) for k in range(3)])):
            if isinstance(answer, Reply):
                answer.refuse("unwanted")
        for _ in (yield Ask("b", [Request(7)])):
            pass

    driver = Driver(Engine(), ClientStates())
    driver.work = Work(tell=lambda work: seen.append((work.exchanges, work.answered, work.asked)))
    driver.drive(two_exchanges(), 1)
    assert seen == [(1, 0, 3), (1, 1, 3), (1, 2, 3), (1, 3, 3), (2, 0, 1), (2, 1, 1)]
