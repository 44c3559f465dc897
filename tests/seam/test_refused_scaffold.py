"""SCAFFOLD (Karimireddy et al. 2020, option II): a refused reply leaves its client's control variate as it was.

The mean of all client variates is the server's after every round, at any participation, refusals included: that
breaks at once if a refused client's new variate were kept, or an accepted one's lost.
"""

import pytest
import torch

from fedlens.core.protocol import Ask, Client, Outcome, Payload, Reply, Request
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TensorField
from tests.seam.seam_kit import ENGINES, gate

N, LR, STEPS = 4, 0.002, 3
VECTOR = TensorField((3,), torch.float64)
EXPECT = Schema({"dx": VECTOR, "dc": VECTOR})


def train(payload: Payload, client: Client, rng: Rng) -> Outcome:
    (x, y), c = client.data, payload["c"]
    own, w = client.state.get("c", torch.zeros_like(c)), payload["w"]
    for _ in range(STEPS):
        w = w - LR * (2 * x.T @ (x @ w - y) / len(y) - own + c)
    new = own - c + (payload["w"] - w) / (STEPS * LR)
    dx = w - payload["w"]
    if payload["fault"] == "nan":
        dx = dx * float("nan")
    if payload["fault"] == "shape":
        dx = dx[:1]
    return Outcome({"dx": dx, "dc": new - own}, state={"c": new})


def one_round(state: Payload, cohort: list[int], faults: dict[int, str]):
    requests = [Request(k, {"fault": faults.get(k, "none")}) for k in cohort]
    replies = yield Ask("train", requests, state, expect=EXPECT)
    taken = []
    for reply in replies:
        if isinstance(reply, Reply) and faults.get(int(reply.client)) == "policy":
            reply.refuse("the algorithm does not want it")
        elif isinstance(reply, Reply):
            taken.append({name: value.clone() for name, value in reply.payload.items()})
    mean = {name: torch.stack([t[name] for t in taken]).mean(0) for name in ("dx", "dc")}
    return {"w": state["w"] + mean["dx"], "c": state["c"] + len(taken) / N * mean["dc"]}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_invariant_survives_refusals(engine: str) -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    plan = [([0, 1, 2], {}), ([1, 2, 3], {1: "nan"}), ([0, 1, 3], {3: "shape"}), ([0, 2, 3], {0: "policy"})]
    with gate(engine, {"train": train}) as g:
        state = {"w": zero, "c": zero}
        for round, (cohort, faults) in enumerate(plan, 1):
            before = {k: g.states.get(k).get("c", zero).clone() for k in range(N)}
            state = g.drive(one_round(state, cohort, faults), round)
            after = {k: g.states.get(k).get("c", zero) for k in range(N)}
            torch.testing.assert_close(sum(after.values()) / N, state["c"], rtol=1e-12, atol=1e-12)
            for k in range(N):
                stays = k not in cohort or k in faults
                assert torch.equal(before[k], after[k]) == stays, (round, k)
    assert {k: dict(v) for k, v in g.tally.failures.items()} == {
        1: {"dx holds NaN or Inf": 1},
        3: {"dx has shape (1,) where (3,) is expected": 1},
        0: {"the algorithm does not want it": 1},
    }
