"""Several clients' outcomes in columns are those of each client, and are checked like them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedlens.core.calls import Calls, StackedOutcomes
from fedlens.core.protocol import ClientDataSource, Id, Program
from fedlens.core.random import Secrets
from fedlens.core.schema import NumberField, Schema, TreeField
from fedlens.core.stacked import StackedTrees

SHAPE = {"w": ((2,), torch.float32)}
SCHEMA = Schema({"update": TreeField(SHAPE), "buffers": TreeField({}), "weight": NumberField(above=0)})


class Numbers(ClientDataSource):
    def data_of(self, client: object) -> list[object]:
        return [client]


def outcomes(update: torch.Tensor, weight: list[float], rows: list[int]) -> StackedOutcomes:
    payload = {"update": StackedTrees({"w": update}), "buffers": {}, "weight": weight}
    return StackedOutcomes(payload, {"batches": [float(k) for k in range(len(rows))]}, rows)


def test_each_call_finds_its_own_row() -> None:
    found = outcomes(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [5.0, 6.0], rows=[1, 0])
    assert len(found) == 2
    assert [one.payload["weight"] for one in found] == [6.0, 5.0]
    assert found[0].payload["update"]["w"].tolist() == [3.0, 4.0]
    assert [one.metrics["batches"] for one in found[:2]] == [1.0, 0.0]
    assert found[1].payload["buffers"] == {}


@pytest.mark.parametrize(
    ("update", "weight", "good"),
    [
        (torch.ones(3, 2), [1.0, 1.0, 1.0], [True, True, True]),
        (torch.tensor([[1.0, 1.0], [1.0, math.nan], [1.0, 1.0]]), [1.0, 1.0, 1.0], [True, False, True]),
        (torch.ones(3, 2), [1.0, 0.0, math.nan], [True, False, False]),
        (torch.ones(3, 2, 1), [1.0, 1.0, 1.0], [False, False, False]),
        (torch.ones(3, 2, dtype=torch.float64), [1.0, 1.0, 1.0], [False, False, False]),
    ],
)
def test_the_columns_pass_where_each_payload_does(
    update: torch.Tensor, weight: list[float], good: list[bool]
) -> None:
    found = outcomes(update, weight, rows=[0, 1, 2])
    assert SCHEMA.passing(found.payload, 3) == good
    assert [SCHEMA.fault(one.payload) is None for one in found] == good


def test_columns_that_are_not_those_of_the_schema_are_left_to_each_payload() -> None:
    found = outcomes(torch.ones(1, 2), [1.0], rows=[0])
    assert Schema().passing(found.payload, 1) == [False]
    assert Schema({"weight": NumberField()}).passing(found.payload, 1) == [False]


def test_a_client_has_the_secrets_of_its_program() -> None:
    own = {7: Secrets(), 3: Secrets()}
    program = Program({}, Numbers(), seed=0, secrets=own.__getitem__)
    calls = Calls(
        program, torch.device("cpu"), {}, {}, [Id(1, 0, 0), Id(1, 0, 1)], [7, 3], [{}, {}], [{}, {}]
    )
    assert [call.client.secrets for call in calls] == [own[7], own[3]]
    simulated = replace(calls, program=replace(program, secrets=None))
    assert simulated[0].client.secrets.token("mask") == Secrets((0, 7)).token("mask")
    assert simulated[0].client.secrets.token("mask") != own[7].token("mask")
