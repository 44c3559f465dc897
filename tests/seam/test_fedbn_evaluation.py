"""FedBN: batch-norm statistics stay at the client, and evaluation is personal. Li et al. 2021 (arXiv 2102.07623)."""

import pytest
import torch
from torch import nn

from fedlens.core.protocol import Ask, Client, Outcome, Payload, Request
from fedlens.core.random import Rng
from fedlens.core.tree import load_into, part, select, spec_of, tree_of
from tests.seam.seam_kit import ENGINES, gate


def build() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


SPEC = spec_of(build())
PERSONAL = [name for name in SPEC if name.startswith("0.")]
SHARED = [name for name in SPEC if not name.startswith("0.")]


def train(payload: Payload, client: Client, rng: Rng) -> Outcome:
    model = build()
    load_into(model, {**payload["model"], **client.state})
    x, y = client.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
    tree = tree_of(model)
    return Outcome({"model": select(tree, SHARED)}, state=select(tree, PERSONAL))


def evaluate(payload: Payload, client: Client, rng: Rng) -> Outcome:
    model = build()
    load_into(model, {**payload["model"], **client.state})
    x, y = client.data
    with torch.no_grad():
        return Outcome({"loss": float((model.eval()(x).squeeze(1) - y).square().mean())})


def one_round(model: Payload):
    replies = list((yield Ask("train", [Request(k) for k in range(4)], {"model": model})))
    model = {name: torch.stack([r.payload["model"][name] for r in replies]).mean(0) for name in SHARED}
    answers = yield Ask("evaluate", [Request(k) for k in range(4)], {"model": model})
    return model, [answer.payload["loss"] for answer in answers]


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_stay_and_evaluation_is_personal(engine: str) -> None:
    torch.manual_seed(0)
    with gate(engine, {"train": train, "evaluate": evaluate}) as g:
        model, history = select(tree_of(build()), SHARED), []
        for round in range(1, 31):
            model, losses = g.drive(one_round(model), round)
            history.append(losses)
        means = [g.states.get(k)["0.running_mean"].mean().item() for k in range(4)]
    assert set(model) == set(SHARED) == set(part(SPEC, "weight")) - set(PERSONAL)
    assert all(
        means[k + 1] - means[k] > 0.5 for k in range(3)
    )  # each client's own: they differ by their shift
    assert max(history[-1]) < 0.2 * max(history[0])
