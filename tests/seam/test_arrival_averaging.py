"""Asynchronous averaging in arrival order: replies of earlier rounds come late, each counts once, discounted by age."""

import time

import pytest
import torch

from fedlens.core.protocol import Ask, Client, Outcome, Payload, Reply, Request
from fedlens.core.random import Rng
from tests.seam.seam_kit import ENGINES, Points, gate


def train(payload: Payload, client: Client, rng: Rng) -> Outcome:
    if client.id == 3:
        time.sleep(0.01)  # the slow one
    x, y = client.data
    w = payload["w"]
    gradient = 2 * x.T @ (x @ w - y) / len(y)
    return Outcome({"update": 0.02 * gradient})


def one_round(state: dict, round: int):
    """Asks every idle client, folds the first two replies that come, and leaves the others out."""
    requests = [Request(k) for k in sorted(set(range(4)) - state["out"])]
    replies = yield Ask("train", requests, {"w": state["w"]}, order="arrival")
    out, w, seen = set(range(4)), state["w"], list(state["seen"])
    for reply in replies:
        assert isinstance(reply, Reply)
        age = round - reply.id.round
        w = w - reply.payload["update"] / (1 + age)
        seen.append((reply.id, age))
        out.discard(reply.client)
        if len(out) == 2:
            break
    return {"w": w, "out": out, "seen": seen}


def measure(state: dict):
    """An evaluation between the rounds, while clients are still at work."""
    (reply,) = yield Ask("measure", [Request("@test")], {"w": state["w"]})
    return reply.payload["loss"]


def loss(payload: Payload, client: Client, rng: Rng) -> Outcome:
    x, y = client.data
    return Outcome({"loss": float((x @ payload["w"] - y).square().mean())})


@pytest.mark.parametrize("engine", ENGINES)
def test_late_replies_count_once_and_it_learns(engine: str) -> None:
    with gate(engine, {"train": train, "measure": loss}, Points(shifted=False)) as g:
        state = {"w": torch.zeros(3, dtype=torch.float64), "out": set(), "seen": []}
        for round in range(1, 121):
            state = g.drive(one_round(state, round), round)
            g.drive(measure(state), round)
    ids = [seen for seen, _ in state["seen"]]
    assert len(ids) == len(set(ids)) == 240
    assert {age for _, age in state["seen"]} >= {0, 1}
    x, y = Points().data_of("@test")
    assert (x @ state["w"] - y).square().mean() < 0.02 * y.square().mean()
    assert (g.tally.replies, g.tally.failed) == (240, 0)
