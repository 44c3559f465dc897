"""The aggregate `optimal-convex`: through a run, beside the plain mean, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.aggregate.mean import AGGREGATES, AggregateContext, Mean
from fedlens.aggregate.optimal_convex import OptimalConvex
from fedlens.algorithms.averaging import averaging
from fedlens.algorithms.client_sampling import Uniform
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.protocol import Ask as Asked
from fedlens.core.protocol import Failure, Id, Reply, Request
from tests.contract.contract_kit import Stopping, experiment, outcome
from tests.identity.identity_kit import course, model, parts, same, world

LOCAL = {"lr": 0.2, "momentum": 0.5, "epochs": 2, "batch_size": 4}
AGGREGATE = {"name": "optimal-convex", "epochs": 2, "batch_size": 16, "starts": 2}
pytestmark = pytest.mark.usefixtures("quick_workers")


def digits(**changes: Any) -> Experiment:
    data = {
        "dataset": "digits",
        "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.3},
        "validation": 0.1,
        "augment": "pad-crop-flip",
    }
    return experiment(**{"data": data, "aggregate": AGGREGATE, "rounds": 2} | changes)


CTX = AggregateContext(1, 1, None, None)  # type: ignore[arg-type]


def reply(slot: int, value: float, weight: float) -> Reply:
    trees = {
        "update": {"w": torch.tensor([value], dtype=torch.float64)},
        "buffers": {"m": torch.tensor([value / 2], dtype=torch.float64)},
        "counters": {"n": torch.tensor(slot)},
    }
    return Reply(Id(1, 0, slot), slot, {**trees, "weight": weight})


def exchanged(answers: list[Any], weights: list[float]) -> tuple[Any, list[Asked]]:
    """The update of a round with these replies, where the server's data choose these weights; and what was asked."""
    steps = OptimalConvex().exchange(
        Asked("train", [Request(0)], {"model": {"w": torch.tensor([1.0])}}), {}, CTX
    )
    asked = [next(steps)]
    try:
        asked.append(steps.send(iter(answers)))
        found = {"weights": torch.tensor(weights, dtype=torch.float64)}
        steps.send(iter([Reply(Id(1, 1, 0), "@validation", found)]))
    except StopIteration as end:
        return end.value, asked
    raise AssertionError


def test_the_update_statistics_and_counters_have_the_weights_that_were_found() -> None:
    answers = [reply(0, 4.0, 1.0), Failure(Id(1, 0, 1), 1, "lost"), reply(2, 8.0, 3.0)]
    update, asked = exchanged(answers, [0.75, 0.25])
    assert update.update == {"w": torch.tensor([5.0])}
    assert update.buffers == {"m": torch.tensor([2.5])}
    assert update.counters == {"n": torch.tensor(2)}
    assert (update.replies, update.weight) == (2, 4.0)
    assert [request.client for request in asked[1].requests] == ["@validation"]
    assert asked[0].reduce is None


def test_weights_of_the_average_give_the_bits_of_the_mean() -> None:
    sizes = [13.0, 7.0, 3.0]  # 13 / 23 * 23 is not 13 in float64
    answers = [reply(slot, 0.3 ** (slot + 1), size) for slot, size in enumerate(sizes)]
    update, _ = exchanged(answers, [size / 23 for size in sizes])
    wanted = Mean().aggregate(answers, {})
    assert wanted is not None
    assert same(update.update, wanted.update)
    assert same(update.buffers, wanted.buffers)
    assert update.weight == 23


def test_a_single_reply_is_the_update_and_no_reply_is_none() -> None:
    alone, asked = exchanged([reply(0, 4.0, 2.0)], [])
    assert alone.update == {"w": torch.tensor([4.0])}
    assert len(asked) == 1
    assert exchanged([Failure(Id(1, 0, 0), 0, "lost")], [])[0] is None


def test_a_failed_search_ends_the_run_with_its_reason() -> None:
    steps = OptimalConvex().exchange(Asked("train", [Request(0)], {"model": {}}), {}, CTX)
    next(steps)
    steps.send(iter([reply(0, 1.0, 1.0), reply(1, 2.0, 1.0)]))
    with pytest.raises(RunFailed, match="on the validation data failed: out of memory"):
        steps.send(iter([Failure(Id(1, 1, 0), "@validation", "out of memory")]))


def test_the_model_of_a_round_is_the_best_combination_of_the_clients_models() -> None:
    """The server's data are all clients' points."""
    there, spec = world((6, 8, 5, 7, 12, 6)), model(norm=True)
    local = {**LOCAL, "batch_size": 64}
    given = parts(there, local, spec, select=Uniform(3))
    rule = OptimalConvex("test", lr=1.0, epochs=30, batch_size=8, starts=2)
    run = course(averaging(given, aggregate=rule), there, rounds=1)
    (step,) = run.steps
    assert len(step.cohort) == 3  # the search is no client
    plain = course(averaging(given), there, rounds=1)
    data = there.pooled()

    @torch.no_grad()
    def loss_and_hits(tree: Any) -> tuple[float, int]:
        module = run.algorithm.parts.model.build().eval()
        module.load_state_dict(dict(tree))
        outputs = module(data.inputs)
        loss = torch.nn.functional.cross_entropy(outputs, data.targets)
        return float(loss), int((outputs.argmax(1) == data.targets).sum())

    (loss, hits), (plain_loss, plain_hits) = loss_and_hits(run.final), loss_and_hits(plain.final)
    assert (hits, -loss) > (plain_hits, -plain_loss)
    gain = step.tally.sums["aggregation_gain"]
    assert gain == pytest.approx((hits - plain_hits) / len(data))
    assert 0 < step.tally.sums["aggregation_distance"] <= 1


def test_a_run_repeats_itself_on_two_workers_and_after_a_stop(tmp_path: Path) -> None:
    result = digits().run(tmp_path / "run")
    whole = outcome(result)
    shared = digits().with_settings("engine.name=processes", "engine.workers=2").run(tmp_path / "processes")
    assert outcome(shared) == whole
    with pytest.raises(KeyboardInterrupt):
        digits().run(tmp_path / "stopped", progress=Stopping(1))
    assert outcome(resume(tmp_path / "stopped")) == whole
    rows = result.metrics[1:]
    assert [row["clients"] for row in rows] == [3, 3]
    assert all(row["failed"] == 0 and row["aggregation_gain"] >= 0 for row in rows)
    assert any(row["aggregation_distance"] > 0 for row in rows)
    mean_run = digits(aggregate={"name": "mean"}).run(tmp_path / "mean")
    assert outcome(mean_run)[0] != whole[0]


def test_clients_trained_together_can_be_combined(tmp_path: Path) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 6}, "validation": 0.1}
    result = digits(data=data, model="linear", engine="vectorized", rounds=2).run(tmp_path / "run")
    assert result.metrics[-1]["failed"] == 0
    assert result.metrics[-1]["aggregation_gain"] >= 0


@pytest.mark.report_page
@pytest.mark.parametrize("on", ["validation", "test"])
def test_a_run_says_which_data_of_the_server_chose_its_weights(on: str, tmp_path: Path) -> None:
    result = digits(aggregate={**AGGREGATE, "on": on}, rounds=1).run(tmp_path / "run")
    (sentence,) = result.summary["disclosures"]
    assert f"labelled {on} data" in sentence
    assert ("optimistic" in sentence) == (on == "test")
    assert sentence.replace("'", "&#39;") in (result.directory / "report.html").read_text()
    assert json.loads((result.directory / "summary.json").read_text())["disclosures"] == [sentence]


SOLO = {"local": {"lr": 0.1, "batch_size": 16}}
HELD = {"validation": 0.2, "validation_from": "client"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.validation=0"], "it has none .*set data.validation = 0.02"),
        (["data.validation_from=client"], "set data.validation_from = 'global'"),
        (["algorithm=scaffold"], "'control-variate' makes the server need a mean"),
        (["algorithm=admm", "algorithm.solver=sgd"], "makes the server need a mean"),
        (["algorithm=fednova"], "FedNova defines the aggregate"),
        (
            ["algorithm=fedbn", "data.validation_from=client", "aggregate.on=test"],
            "parts of this model stay at the clients",
        ),
        (["aggregate.epochs=0"], "aggregate.epochs"),
        (["aggregate.on=train"], "aggregate.on"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(settings: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        digits().with_settings(*settings).run(tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_factory_has_the_settings() -> None:
    made = AGGREGATES.find("optimal-convex")(on="test", weighting="uniform", starts=1, lr=0.5)
    assert made == OptimalConvex("test", "uniform", lr=0.5, starts=1)
