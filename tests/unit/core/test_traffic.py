"""What crosses between server and clients is counted from the messages themselves."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, ClientStates, Id, Reduce, Reply, Request
from fedlens.core.schema import NumberField, Schema, TensorField, TreeField, nbytes
from fedlens.core.traffic import Traffic
from tests.unit.core.test_driver import Scripted, reply, taking

TREE = {"w": torch.zeros(3, 2), "b": torch.zeros(2)}


def test_the_fields_of_asks_and_replies_are_listed_with_their_number_of_values() -> None:
    answers = [reply(0, 5, update=TREE, note=[1.0, 2.0]), reply(1, 6, update=TREE, note=[1.0, 2.0])]
    driver = Driver(Scripted(answers), ClientStates())
    ask = Ask("train", [Request(5), Request(6, {"work": 2})], {"model": TREE, "lr": 0.1})
    driver.drive(taking(ask, refuse=[6]), 1)
    assert driver.tally.traffic.rows == {
        "train": {
            "down": {"model": 8, "lr": 1, "work": 1},
            "up": {"update": 8, "note": 2},
            "measured": ["batches", "examples", "loss"],
            "asks": 2,
            "replies": 2,  # a refused reply has left its client, too
            "bytes_down": driver.tally.bytes_down,
            "bytes_up": 20,
            "rounds": [1, 1],
        }
    }


def test_the_log_that_a_client_keeps_does_not_leave_it() -> None:
    """A simulation keeps the logs of its clients; at a real site they stay."""
    log = {"seen": "x" * 100}
    kept = replace(reply(0, 5, note=[1.0], log=log), nbytes=8 + nbytes(log))
    driver = Driver(Scripted([kept]), ClientStates())
    driver.drive(taking(Ask("keys", [Request(5)], logged=True)), 1)
    row = driver.tally.traffic.rows["keys"]
    assert row["up"] == {"note": 1}
    assert row["bytes_up"] == driver.tally.bytes_up == 8


def test_a_field_that_the_worker_has_summed_left_its_client() -> None:
    fields = {
        "update": TreeField({"w": ((3, 2), torch.float32)}),
        "counts": TensorField((10,), torch.float64),
        "weight": NumberField(),
    }
    ask = Ask("train", [Request(0)], expect=Schema(fields), reduce=Reduce({"update": "sum", "counts": "sum"}))
    driver = Driver(Scripted([reply(0, 0, round=4, weight=1.0)]), ClientStates())
    driver.drive(taking(ask), 4)
    assert driver.tally.traffic.rows["train"]["up"] == {"update": 6, "counts": 10, "weight": 1}


def test_holders_of_server_data_are_no_clients() -> None:
    answer = Reply(Id(1, 0, 0), "@test", {"loss": 1.0}, {}, None, nbytes=8)
    driver = Driver(Scripted([answer]), ClientStates())
    driver.drive(taking(Ask("evaluate", [Request("@test")])), 1)
    assert driver.tally.traffic.to_payload() == {"clients": {}, "server": {"evaluate": ["@test"]}}


def test_rounds_add_up_and_the_added_is_not_changed() -> None:
    def of(round: int, op: str) -> Traffic:
        driver = Driver(Scripted([reply(0, 5, round=round, update=TREE)]), ClientStates())
        driver.drive(taking(Ask(op, [Request(5)], {"model": TREE})), round)
        return driver.tally.traffic

    first, second = of(1, "train"), of(3, "train")
    total = Traffic.of(first.to_payload())
    total.add(second)
    total.add(of(4, "count"))
    assert total.rows["train"]["rounds"] == [1, 3]
    assert total.rows["train"]["replies"] == 2
    assert total.rows["count"]["rounds"] == [4, 4]
    assert first.rows["train"]["replies"] == second.rows["train"]["replies"] == 1
