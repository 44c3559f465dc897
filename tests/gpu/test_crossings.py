"""What crosses between the processor and a GPU in a later round of a run, and how often the server waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedlens import Experiment
from fedlens.aggregate.mean import Mean
from fedlens.aggregate.server_steps import ServerSGD
from fedlens.core.protocol import (
    BatchedOp,
    Call,
    Client,
    ClientDataSource,
    ClientId,
    Id,
    Outcome,
    Payload,
    Program,
    Reply,
)
from fedlens.core.random import Rng
from fedlens.core.schema import Schema
from fedlens.core.stacked import StackedTrees
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.engines.executor import Executor, Item
from fedlens.local.optimizers import descend
from fedlens.run.progress import ProgressBase
from tests.contract.contract_kit import nightly_but

ROUND = 5  # of six: inputs are compared in the first three, and the last one is evaluated in more detail


def images(*, seed: int = 0) -> Dataset:
    draw = np.random.default_rng(seed)
    inputs, labels = draw.integers(0, 256, (140, 1, 8, 8), np.uint8), np.arange(140) % 4
    made: Dataset = dataset(inputs[:80], labels[:80], inputs[80:], labels[80:])
    return made


DATA: dict[str, Any] = {"dataset": images, "partition": {"name": "iid", "clients": 8}}
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class Rounds(ProgressBase):
    """Counts the events up to the end of each round."""

    def __init__(self, simgpu: ModuleType) -> None:
        self.simgpu, self.counts = simgpu, list[Counter[str]]()

    def round_done(self, metrics: dict[str, Any]) -> None:
        self.counts.append(self.simgpu.COUNT.copy())


class Crossings:
    """The events of a round, which is evaluated: `a_round` and, for each client that trains, `a_client`."""

    def __init__(self, folder: Path, simgpu: ModuleType, **changes: Any) -> None:
        few, many = (self._counts(folder / f"{k}", simgpu, k, changes) for k in (2, 4))
        self.a_client = {name: (many[name] - few[name]) / 2 for name in many}
        self.a_round = {name: few[name] - 2 * each for name, each in self.a_client.items()}

    @staticmethod
    def _counts(folder: Path, simgpu: ModuleType, cohort: int, changes: dict[str, Any]) -> Counter[str]:
        settings: dict[str, Any] = {
            "rounds": ROUND + 1,
            "data": DATA,
            "model": "mcmahan-cnn",
            "local": {"lr": 0.05, "batch_size": 5},
            "engine": {"name": "inline", "device": "cuda"},
            "select": {"clients_per_round": cohort},
            **changes,
        }
        rounds = Rounds(simgpu)
        Experiment(**settings).run(folder, progress=rounds)
        before, after = rounds.counts[ROUND - 1 : ROUND + 1]
        return Counter({name: after[name] - before[name] for name in after})


class NoData(ClientDataSource):
    def data_of(self, client: ClientId) -> None:
        return None


def shifted(payload: Payload, client: Client, rng: Rng) -> Outcome:
    return Outcome(
        {name: {leaf: value + 1 for leaf, value in payload[name].items()} for name in ("model", "own")},
        {"seen": {leaf: value + 1 for leaf, value in client.state["seen"].items()}},
    )


def test_to_another_process_each_reply_crosses_in_one_copy(simgpu: ModuleType) -> None:
    def tree() -> dict[str, torch.Tensor]:
        return {f"{k}": torch.full((3, k), float(k)) for k in range(1, 8)}

    executor = Executor(Program({"shift": shifted}, NoData(), 0, "cuda"))
    items = [Item(Id(1, 0, k), k, {"own": tree()}, {"seen": tree()}) for k in range(3)]
    executor.block("shift", {"model": tree()}, items, Schema(), None)  # the first visits compare their inputs
    with simgpu.counted() as counts:
        answers = executor.block("shift", {"model": tree()}, items, Schema(), None)
    assert counts["uploads"] == 1 + 3  # what is shared, and what differs from client to client
    assert counts["downloads"] == 3 + 3  # each reply, and the norms of its tensors
    for answer in answers:
        assert isinstance(answer, Reply)
        for made in (answer.payload["model"], answer.payload["own"], (answer.state or {})["seen"]):
            assert all(torch.equal(made[leaf], value + 1) for leaf, value in tree().items())


def test_the_server_takes_as_many_launches_for_many_leaves_as_for_few(simgpu: ModuleType) -> None:
    launches = []
    for leaves in (3, 30):
        trees = [{f"{k}": torch.ones(k, device="cuda") for k in range(leaves)} for _ in range(3)]
        replies = [Reply(Id(1, 0, k), k, {**parts(tree), "weight": 2.0 + k}) for k, tree in enumerate(trees)]
        with simgpu.counted() as counts:
            update = Mean().aggregate(replies)
            assert update is not None
            weights, _ = ServerSGD().step_in_place(trees[0], update.update, {})
        assert all(torch.equal(value, torch.zeros_like(value)) for value in weights.values())
        launches.append(counts["kernels"])
    assert launches[0] == launches[1] <= 12


def parts(update: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"update": update, "buffers": {}, "counters": {}}


STAY: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "scaffold": {"algorithm": "scaffold"},
    "fedavgm": {"algorithm": "fedavgm"},
    "fedadam": {"algorithm": "fedadam"},
    "feddyn": {"algorithm": "feddyn"},
    "mime": {"algorithm": "mime"},
    "resnet20": {"model": {"name": "resnet20", "norm": "batch"}},
    "vectorized": {"engine": {"name": "vectorized", "group": 2, "device": "cuda"}},
    "vectorized-scaffold": {
        "algorithm": "scaffold",
        "engine": {"name": "vectorized", "group": 2, "device": "cuda"},
    },
}


@pytest.mark.parametrize("name", nightly_but({"scaffold"}, STAY))
def test_the_model_and_the_replies_stay_on_the_gpu(name: str, tmp_path: Path, simgpu: ModuleType) -> None:
    crossings = Crossings(tmp_path, simgpu, **STAY[name])
    assert crossings.a_round["uploads"] == 0
    assert crossings.a_round["downloads"] == crossings.a_round["waits"] == 1  # what the evaluation measured
    visits = 2 if name == "mime" else 1
    assert crossings.a_client["waits"] <= 2 * visits


@pytest.mark.nightly
def test_personal_leaves_stay_on_the_gpu(tmp_path: Path, simgpu: ModuleType) -> None:
    changes = {"algorithm": "fedbn", "model": {"name": "small-cnn", "norm": "batch"}}
    crossings = Crossings(
        tmp_path, simgpu, **changes, data=DATA | {"validation": 0.2, "validation_from": "client"}
    )
    assert crossings.a_round["uploads"] == 8  # which examples each client is measured on
    assert crossings.a_round["downloads"] == crossings.a_round["waits"] == 8  # what is measured there
    assert crossings.a_client["waits"] == 2


@pytest.mark.nightly
def test_for_code_that_does_not_follow_the_device_a_round_sends_the_model_once_and_each_reply_comes_home(
    tmp_path: Path, simgpu: ModuleType
) -> None:
    stay = Crossings(tmp_path / "stay", simgpu)
    home = Crossings(tmp_path / "home", simgpu, aggregate=f"{EXAMPLES}/own_aggregate.py:Median")
    assert home.a_round["uploads"] == stay.a_round["uploads"] + 1
    assert home.a_round["downloads"] == stay.a_round["downloads"]
    assert home.a_client["uploads"] == stay.a_client["uploads"]
    assert home.a_client["downloads"] == stay.a_client["downloads"] + 1
    assert home.a_round["waits"] == stay.a_round["waits"]


def test_a_tensor_that_was_changed_in_place_is_sent_again() -> None:
    def sent(payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({"model": {name: value + 0 for name, value in payload["model"].items()}})

    executor, model = Executor(Program({"send": sent}, NoData(), 0, "cuda")), {"w": torch.zeros(3)}
    for value in (0.0, 1.0):
        model["w"].fill_(value)
        (answer,) = executor.block("send", {"model": model}, [Item(Id(1, 0, 0), 0, {}, {})], Schema(), None)
        assert isinstance(answer, Reply)
        assert answer.payload["model"]["w"].tolist() == [value] * 3


class Together(BatchedOp):
    """Answers with rows inside of trees: each look at a row makes new tensors."""

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        raise NotImplementedError

    def together(self, calls: Sequence[Call]) -> list[Outcome]:
        leaves = {f"{k}": torch.ones(len(calls), 4, device="cuda") for k in range(7)}
        leaves["0"][16] = float("nan")
        return [Outcome({"deep": {"tree": row}}) for row in StackedTrees(leaves).rows()]

    def obstacle(self) -> None:
        return None

    def footprint(self, device: torch.device, largest: int | None = None, data: Any = None) -> int:
        return 1


def test_of_rows_in_a_tree_the_one_that_is_not_finite_is_refused() -> None:
    executor = Executor(Program({"op": Together()}, NoData(), 0, "cuda"))
    items = [Item(Id(1, 0, k), k, {}, {}) for k in range(32)]
    answers = executor.together("op", {}, items, Schema())
    assert [answer.client for answer in answers if not isinstance(answer, Reply)] == [16]


def test_a_rate_whose_leaves_have_no_gradient_takes_no_step() -> None:
    """As where a product takes its place, in groups of clients with rates of their own for layers."""
    leaves = [torch.ones(2, device="cuda") for _ in range(3)]
    slopes = [torch.ones(2, device="cuda"), None, torch.ones(2, device="cuda")]
    descend(leaves, slopes, [0.5, 0.25, 0.5])
    assert [leaf.tolist() for leaf in leaves] == [[0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]
