"""A number that a part at the server sets in each round: recorded, drawn, compared, and taken by a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment, Result
from fedlens.aggregate.mean import Mean
from fedlens.base.errors import HookError
from fedlens.core.schema import NumberField
from fedlens.core.tree import add
from fedlens.local.rules import ClientRule, ServerRule
from fedlens.pages.compare import curve_figure, write_page_of
from fedlens.pages.run_charts import run_charts
from fedlens.results.comparison import Comparison
from fedlens.results.rows import row_of_run
from fedlens.results.run import read_run
from fedlens.run.progress import ProgressBase
from fedlens.settings.config import read_config
from fedlens.settings.config_source import read_source
from fedlens.studies.measured_metrics import columns_of


def halved() -> ClientRule:
    def after(state: Any, update: Any, ctx: Any) -> Any:
        ctx.metrics["round_squared"] = ctx.round**2
        return state, replace(update, update={name: 0.5 * delta for name, delta in update.update.items()})

    return ClientRule(name="halved", server_rules={"halved": ServerRule(after=after)})


class Counted(Mean):
    def aggregate(self, answers: Any, fields: Any = None, ctx: Any = None) -> Any:
        ctx.metrics["counted"] = torch.tensor(len(ctx.eligible))  # a tensor with one number will do
        return super().aggregate(answers, fields, ctx)


class Plain:
    def init(self, weights: Any) -> dict[str, Any]:
        return {}

    def step(self, weights: Any, update: Any, state: Any) -> Any:
        return add(weights, update, scale=-1.0), state, {"leaves": len(update)}


def experiment(**parts: Any) -> Experiment:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
    common = {"rounds": 2, "model": "linear", "local": {"lr": 0.1, "steps": 1, "batch_size": 20}}
    return Experiment(**common, data=data, engine="inline", evaluation={"every": 2}, **parts)


def test_the_description_of_a_run_names_its_own_parts(tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = []

    class Listening(ProgressBase):
        def started(self, plan: dict[str, Any]) -> None:
            plans.append(plan)

    own = experiment(client=halved, aggregate=Counted, server=Plain)
    own.run(tmp_path / "run", report=False, progress=Listening(), until=0)
    assert [plan["algorithm"] for plan in plans] == ["fedavg + halved + Plain + Counted"]
    assert read_run(tmp_path / "run").algorithm == plans[0]["algorithm"]


def test_a_field_that_is_not_aggregated_is_named_where_the_server_rule_reads_it(tmp_path: Path) -> None:
    def after(state: Any, update: Any, ctx: Any) -> Any:
        return state, replace(update, update={"w": update.more["gap"]})

    rule = ClientRule(
        name="gap",
        finish=lambda parameters, context: ({"gap": 1.0}, None),
        expect=lambda spec: {"gap": NumberField()},
        server_rules={"gap": ServerRule(after=after)},
    )
    with pytest.raises(HookError, match=r"`after` .* reads 'gap', .* lacks.*; add \"gap\": \"mean\" or"):
        experiment(client=lambda: rule).run(tmp_path / "run", report=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    own = experiment(client=halved, aggregate=Counted, server=Plain)
    return own.run(tmp_path_factory.mktemp("run") / "own", report=False)


@pytest.fixture
def folder(result: Result) -> Path:
    return Path(str(result.summary["directory"]))


def test_each_part_of_the_server_sets_numbers_of_the_round(result: Result) -> None:
    names = ("round_squared", "counted", "leaves")
    assert [tuple(line.get(name) for name in names) for line in result.metrics] == [
        (None, None, None), (1.0, 4.0, 2.0), (4.0, 4.0, 2.0)
    ]  # fmt: skip


def test_the_page_a_comparison_and_a_study_have_them(folder: Path, tmp_path: Path) -> None:
    charts = {panel.title: panel for panel in run_charts(read_run(folder), None)}
    assert charts["Round squared"].series[0].y == [1.0, 4.0]
    both = Comparison.of([folder])
    assert curve_figure(both, "round_squared").series[0].y == [1.0, 4.0]
    assert curve_figure(both, "round_squared").title == "Round squared"
    assert "Round squared" in write_page_of(both, tmp_path / "compare.html").read_text(encoding="utf-8")
    row = row_of_run(read_run(folder))
    assert (row.curve["round"], row.curve["round_squared"]) == ([0, 2], [None, 4.0])
    assert row.final("round_squared") == 4.0
    own = {"client": "my.py:halved"}, {"aggregate": "my.py:Counted"}, {"server": "my.py:Plain"}
    for part in own:
        assert columns_of(read_config({**read_source("digits").values, **part})) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", 1.0, "ctx.metrics has 'loss', a column that the run itself computes"),
        ("test_accuracy", 1.0, "ctx.metrics has 'test_accuracy', a column that the run itself computes"),
        ("norms", torch.ones(2), "ctx.metrics['norms'] is a Tensor, and must be a number"),
    ],
)
def test_a_name_of_the_run_and_a_value_that_is_no_number_are_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    def rule() -> ClientRule:
        def after(state: Any, update: Any, ctx: Any) -> Any:
            ctx.metrics[name] = value
            return state, update

        return ClientRule(name="wrong", server_rules={"wrong": ServerRule(after=after)})

    with pytest.raises(HookError) as refused:
        experiment(client=rule).run(tmp_path / "run", report=False)
    assert refused.value.what == message
