"""The central evaluation: every example once, whatever the cut, and failures that end the run."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.algorithms.client_evaluation import everywhere, spread
from fedlens.base.errors import RunFailed
from fedlens.base.threads import ReadAhead
from fedlens.core.driver import Driver
from fedlens.core.measured import Measured, Total
from fedlens.core.modules import loadable
from fedlens.core.protocol import (
    Client,
    ClientDataSource,
    ClientStates,
    FederationInfo,
    Id,
    Program,
    Reply,
    RoundContext,
)
from fedlens.core.random import Rng, Secrets
from fedlens.core.tree import tree_of
from fedlens.engines.inline import inline
from fedlens.tasks import central_evaluation
from fedlens.tasks.central_evaluation import Evaluate, central_metrics
from fedlens.tasks.classification import Classification
from fedlens.tasks.task import Task
from tests.identity.identity_kit import CLASSES, FEATURES, Points, model, world

TASK, SPEC = Classification(), model(norm=True, dropout=0.5)
POOLED = world().pooled()


class Held(ClientDataSource):
    def data_of(self, name: str) -> Points:
        return {"@test": POOLED, "@validation": Points(POOLED.inputs[:4], POOLED.targets[:4])}[name]


def measure(names, batch: int = 500, held=None) -> dict[str, float]:
    engine, states = inline(), ClientStates()
    engine.open(Program({"evaluate": Evaluate(SPEC, TASK, batch)}, Held(), 0), states)
    try:
        held = held or {"@test": len(POOLED), "@validation": 4}
        info = FederationInfo(np.array([1]), CLASSES, (FEATURES,), held)
        return Driver(engine, states).drive(central_metrics(tree_of(SPEC.build()), info, TASK, names), 0)
    finally:
        engine.close()


def expected(points: Points) -> dict[str, float]:
    module = SPEC.build().eval()  # running statistics, no dropout
    with torch.no_grad():
        logits = module(points.inputs)
    loss = torch.nn.functional.cross_entropy(logits, points.targets).item()
    return {"loss": loss, "accuracy": (logits.argmax(1) == points.targets).double().mean().item()}


@pytest.mark.parametrize("stretch", [1, 7, 35, 1000])
@pytest.mark.parametrize("batch", [1, 3, 500])
def test_every_example_counts_once_whatever_the_cut(stretch: int, batch: int, monkeypatch) -> None:
    monkeypatch.setattr(central_evaluation, "stretch_of", lambda values: stretch)
    measured = measure(["@test"], batch)
    right = expected(POOLED)
    assert measured["test_accuracy"] == right["accuracy"]
    assert math.isclose(measured["test_loss"], right["loss"], rel_tol=1e-12)


def test_each_holder_has_its_own_metrics() -> None:
    measured = measure(["@test", "@validation"])
    names = {"loss", "accuracy", "accuracy_balanced", "calibration_error"}
    assert set(measured) == {f"{holder}_{name}" for holder in ("test", "validation") for name in names}
    right = expected(Held().data_of("@validation"))
    assert measured["validation_accuracy"] == right["accuracy"]


def test_evaluating_changes_neither_statistics_nor_inputs() -> None:
    tree, scratch = tree_of(SPEC.build()), {}
    before = {name: value.clone() for name, value in tree.items()}
    client = Client("@test", POOLED, {}, Secrets((0,)), scratch, torch.device("cpu"))
    Evaluate(SPEC, TASK, 5)({"model": tree, "start": 0, "stop": 35}, client, Rng((0,)))
    assert all(torch.equal(tree[n], v) for n, v in before.items())
    (learner,) = scratch.values()
    assert all(torch.equal(v, before[n]) for n, v in learner.module.state_dict().items())


def test_an_evaluation_that_fails_ends_the_run_with_the_reason() -> None:
    with pytest.raises(RunFailed, match="evaluating the model on @train failed: KeyError"):
        measure(["@train"], held={"@train": 5})


def test_a_holder_without_examples_has_no_loss() -> None:
    assert math.isnan(measure(["@test"], held={"@test": 0})["test_loss"])


class OnlyLoss(Task):
    """Measures no more than it needs."""

    kind = "classification"

    def loss(self, outputs, targets, weights=None, normalize=True):
        return torch.nn.functional.cross_entropy(outputs, targets)

    def measure(self, outputs, targets):
        if len(targets) == 2:
            raise ValueError("a batch of two")
        return Measured(
            {"sum": self.loss(outputs, targets).double() * len(targets), "n": torch.tensor(len(targets))}
        )

    def metrics(self, measured):
        return {"loss": float(measured.sums["sum"]) / int(measured.sums["n"])}


def test_clients_are_measured_by_a_task_that_counts_no_examples() -> None:
    ctx = RoundContext(1, 1, FederationInfo(np.array([5, 5]), 3, (4,), {}, np.array([3, 4])), Rng((0,)))
    steps = everywhere({"model": {}}, ctx, OnlyLoss(), "all")
    asked = next(steps)
    replies = [
        Reply(
            Id(1, 0, slot),
            request.client,
            {"after": OnlyLoss().measure(torch.eye(3), torch.arange(3)).to_payload()},
        )
        for slot, request in enumerate(asked.requests)
    ]
    with pytest.raises(StopIteration) as ended:
        steps.send(replies)
    assert [reply.metrics["validation_examples"] for reply in replies] == [3, 4]
    assert ended.value.value["clients_loss_std"] == 0


def measured_by_client(correct: int) -> dict[str, Any]:
    """A client's measurements of three images, of which it says that so many were right."""
    found = TASK.condensed(TASK.measure(torch.eye(3), torch.arange(3)))
    return {"after": Measured({**found.sums, "correct": torch.tensor(correct)}).to_payload()}


def test_a_client_that_measures_more_than_everything_is_refused() -> None:
    ctx = RoundContext(1, 1, FederationInfo(np.array([5, 5]), 3, (4,), {}, np.array([3, 3])), Rng((0,)))

    def answers(*correct: int) -> tuple[list[Reply], Any]:
        steps = everywhere({"model": {}}, ctx, TASK, "all", pooled=True)
        next(steps)
        replies = [Reply(Id(1, 0, k), k, measured_by_client(each)) for k, each in enumerate(correct)]
        with pytest.raises(StopIteration) as ended:
            steps.send(replies)
        return replies, ended.value.value

    (good, bad), metrics = answers(2, 999)
    assert (good.refused, bad.refused) == (None, "its metric 'accuracy' is 333, outside [0, 1]")
    assert metrics["validation_accuracy"] == metrics["clients_accuracy_mean"] == 2 / 3
    assert "validation_accuracy" not in bad.metrics
    with pytest.raises(RunFailed, match="no client could be measured: its metric 'accuracy' is -1"):
        answers(-3, -3)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({}, "KeyError: 'after'"),
        ({"after": {"sums": {}, "sparse": {}, "rows": {}}}, "KeyError: "),
        ({"after": {"sums": 3, "sparse": {}, "rows": {}}}, "TypeError: 'int' object is not iterable"),
        ({"after": None}, "TypeError: 'NoneType' object is not subscriptable"),
        (measured_by_client(1)["after"], "KeyError: 'after'"),
        (
            {"after": {"sums": {}, "sparse": {"loss": {"shape": [2**24 + 1]}}, "rows": {}}},
            "ValueError: sums of 16,777,217 values, where at most 16,777,216 are expected",
        ),
    ],
)
def test_a_client_whose_measurements_cannot_be_read_is_refused(payload: Any, said: str) -> None:
    ctx = RoundContext(1, 1, FederationInfo(np.array([5, 5]), 3, (4,), {}, np.array([3, 3])), Rng((0,)))
    steps = everywhere({"model": {}}, ctx, TASK, "all", pooled=True)
    next(steps)
    good, bad = Reply(Id(1, 0, 0), 0, measured_by_client(2)), Reply(Id(1, 0, 1), 1, payload)
    with pytest.raises(StopIteration) as ended:
        steps.send([good, bad])
    assert good.refused is None
    assert bad.refused is not None
    assert bad.refused.startswith(f"the measurements cannot be read: {said}")
    assert ended.value.value["validation_accuracy"] == 2 / 3


def test_a_client_with_sums_of_another_shape_adds_nothing() -> None:
    summed = Total()
    summed.add(Measured({"a": torch.tensor(1), "b": torch.tensor([1, 2])}, {"r": torch.zeros(2, 3)}))
    for sums, rows in (
        ({"a": torch.tensor(1), "b": torch.tensor([1, 2, 3])}, {}),
        ({"a": torch.tensor(1.5)}, {}),
        ({"a": torch.tensor(1)}, {"r": torch.zeros(2, 4)}),
    ):
        with pytest.raises(ValueError, match=r"measurement '[abr]' is torch\..* before"):
            summed.add(Measured(sums, rows))
    found = summed.result()
    assert (int(found.sums["a"]), found.sums["b"].tolist(), len(found.rows["r"])) == (1, [1, 2], 2)


def test_the_worst_tenth_of_an_error_has_the_largest_values() -> None:
    rows = [{"calibration_error": k / 20, "loss": float(k), "accuracy": k / 20} for k in range(20)]
    found = spread(rows, TASK.errors)
    worst = [found[f"clients_{name}_worst_decile"] for name in ("calibration_error", "loss", "accuracy")]
    assert worst == [37 / 40, 18.5, 1 / 40]


def test_an_evaluation_that_fails_leaves_no_thread() -> None:
    ahead = ReadAhead(iter([(POOLED.inputs[:n], POOLED.targets[:n]) for n in (3, 2, 3)]), 1)

    class Ahead(Points):
        def stretches(self, start: int, stop: int, size: int):
            return ahead

    client = Client("@test", POOLED, {}, Secrets((0,)), {}, torch.device("cpu"))
    learner = loadable(SPEC, client)
    with pytest.raises(ValueError, match="a batch of two"):
        central_evaluation.measured(OnlyLoss(), learner, Ahead(POOLED.inputs, POOLED.targets), 3, 0, 8)
    assert ahead._thread is None
