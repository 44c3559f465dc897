"""Split learning: the clients hold the lower layer, the server the upper; two exchanges a step."""

import pytest
import torch

from fedlens.core.protocol import Ask, Client, Outcome, Payload, Request
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TensorField
from tests.seam.seam_kit import ENGINES, Points, gate

LR = 0.05


def lower(client: Client) -> torch.Tensor:
    return client.state.get("w", torch.eye(3, dtype=torch.float64))


def forward(payload: Payload, client: Client, rng: Rng) -> Outcome:
    x, y = client.data
    return Outcome({"hidden": x @ lower(client), "y": y})


def backward(payload: Payload, client: Client, rng: Rng) -> Outcome:
    x, _ = client.data
    return Outcome({}, state={"w": lower(client) - LR * x.T @ payload["gradient"]})


def one_step(upper: torch.Tensor):
    expect = Schema({"hidden": TensorField((16, 3), torch.float64), "y": TensorField((16,), torch.float64)})
    reply = next((yield Ask("forward", [Request(0)], expect=expect)))
    hidden = reply.payload["hidden"].clone().requires_grad_()
    top = upper.clone().requires_grad_()
    loss = (hidden @ top - reply.payload["y"]).square().mean()
    to_hidden, to_top = torch.autograd.grad(loss, [hidden, top])
    list((yield Ask("backward", [Request(0, {"gradient": to_hidden})])))
    return upper - LR * to_top


@pytest.mark.parametrize("engine", ENGINES)
def test_split_training_is_central_training(engine: str) -> None:
    upper = torch.ones(3, dtype=torch.float64)
    with gate(engine, {"forward": forward, "backward": backward}) as g:
        for round in range(1, 11):
            upper = g.drive(one_step(upper), round)
        split = g.states.get(0)["w"]

    x, y = Points().data_of(0)
    w, top = (
        torch.eye(3, dtype=torch.float64).requires_grad_(),
        torch.ones(3, dtype=torch.float64).requires_grad_(),
    )
    optimizer = torch.optim.SGD([w, top], lr=LR)
    for _ in range(10):
        optimizer.zero_grad()
        (x @ w @ top - y).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(split, w.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(upper, top.detach(), rtol=1e-12, atol=1e-12)
