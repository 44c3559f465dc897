"""Which runs a study has, and which are refused before anything starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError
from fedlens.core.measured import Measured
from fedlens.models.simple import mlp
from fedlens.results.rows import Row
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source, override, read_source
from fedlens.settings.effective_rate import effective_rate
from fedlens.settings.plan import plan as planned
from fedlens.studies import run_settings
from fedlens.studies.study_plan import StudyPlan
from fedlens.tasks.classification import Classification

MOMENTUM = {"set": {"algorithm.name": "fedavgm"}, "grid": {"algorithm.momentum": [0.7, 0.9]}}


class Kappa(Classification):
    """A task of a user's own."""

    def metrics(self, measured: Measured) -> dict[str, float]:
        return {"kappa": 0.5}


class ListedKappa(Kappa):
    """The same, with the names of its metrics."""

    metric_names = ("kappa",)


def load(**settings: Any) -> StudyPlan:
    return StudyPlan.load({"base": "digits", **settings})


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(**settings)
    return str(error.value)


def config_of(settings: Any) -> Any:
    return planned(read_config(settings), Source(dict(settings))).config


def line(digest: str, value: float = 0.5, metric: str = "test_accuracy") -> Row:
    return Row(digest, "run", "finished", None, 1, "test_accuracy", {"round": [1], metric: [value]})


def test_a_study_is_every_combination_of_cases_methods_and_seeds() -> None:
    plan = load(
        seeds=[3, 5],
        grid={"data.partition.clients": [5, 10]},
        cases={"a": {}, "b": {"set": {"local.epochs": 1}}},
        methods={"fedavg": {"label": "FedAvg"}, "fedavgm": MOMENTUM},
    )
    info = plan.info({})
    assert info.methods == {
        "fedavg": "FedAvg",
        "fedavgm momentum=0.7": "fedavgm, momentum = 0.7",
        "fedavgm momentum=0.9": "fedavgm, momentum = 0.9",
    }
    assert info.cases == [{"case": c, "data.partition.clients": n} for c in "ab" for n in (5, 10)]
    assert info.dimensions == {"case": "case", "data.partition.clients": "clients"}
    assert len(plan.runs) == len({run.digest for run in plan.runs}) == 4 * 3 * 2
    assert [entry.digest for entry in info.entries] == [run.digest for run in plan.runs]
    run = plan.runs[-1]
    assert (run.settings["seed"], run.settings["local"]["epochs"]) == (5, 1)
    assert run.settings["algorithm"] == {"name": "fedavgm", "momentum": 0.9}
    assert run.key == "fedavgm-momentum0.9-b-clients10-seed5"


def test_the_only_method_names_the_parts_of_the_user() -> None:
    def methods(**settings: Any) -> Any:
        return load(**settings).info({}).methods

    examples = Path(__file__).parents[3] / "docs" / "examples"
    median, flip = f"{examples}/own_aggregate.py:Median", f"{examples}/sign_flip.py:sign_flip"
    assert methods() == methods(set={"aggregate": "mean"}) == {"fedavg": "fedavg"}
    assert methods(set={"aggregate.name": median}) == {"fedavg": "fedavg + Median"}
    assert methods(set={"aggregate": median, "client": {"name": flip, "clients": [0]}}) == {
        "fedavg": "fedavg + sign_flip + Median"
    }
    assert methods(set={"aggregate": median}, methods={"fedavg": {}}) == {"fedavg": "fedavg"}


def test_due_runs_are_those_without_a_line() -> None:
    plan = load(grid={"local.lr": [0.1, 0.3]}, seeds=[0, 1])
    due = plan.due({})
    assert [one.run for one in due] == list(plan.runs)
    assert all(one.until is None for one in due)
    lines = {run.digest: line(run.digest) for run in plan.runs[1:]}
    assert [one.run for one in plan.due(lines)] == [plan.runs[0]]
    assert plan.due(lines | {plan.runs[0].digest: line("")}) == []


def test_the_settings_of_a_run_are_those_of_set_on_the_command_line() -> None:
    """A renamed component loses the settings that only the old one has, and keeps the selection of its paper."""
    for name in ("fedvc", "scaffold", "centralized"):
        run = load(base="cifar10/fedavgm-dirichlet", set={"algorithm.name": name}).runs[0]
        source = override(
            read_source("cifar10/fedavgm-dirichlet"),
            [f"algorithm.name={name}", "engine.name=inline", "name=x"],
        )
        same = planned(read_config(source.values), source).config
        assert config_of({**run.settings, "name": "x"}) == same


def test_a_table_with_another_algorithm_brings_its_selection() -> None:
    table = load(set={"algorithm": {"name": "fedvc", "examples": 20}}).runs[0]
    named = load(set={"algorithm.name": "fedvc", "algorithm.examples": 20}).runs[0]
    assert config_of(table.settings).select["name"] == "by-size"
    assert table.digest == named.digest


def test_a_stopped_run_goes_on_and_a_failed_one_does_not() -> None:
    plan = load()
    digest = plan.runs[0].digest
    assert len(plan.due({digest: replace(line(digest), status="stopped")})) == 1
    assert plan.due({digest: replace(line(digest), status="failed")}) == []


def test_a_base_that_holds_out_data_keeps_its_share() -> None:
    tuned: dict[str, Any] = {"grid": {"local.lr": [0.1, 0.3]}, "tune": {}}
    for clients, final in (({}, 0.0), ({"data.validation_from": "client"}, 0.3)):
        plan = load(set={"data.validation": 0.3, **clients}, **tuned)
        assert {run.settings["data"]["validation"] for run in plan.runs} == {0.3}
        cells = plan.cells
        run = cells.final_runs(cells.methods[0], cells.cases[0], {"local.lr": 0.1})[0]
        assert run.settings["data"]["validation"] == final


def test_a_run_of_a_seed_is_that_of_the_recipe_with_the_seed() -> None:
    run = load(seeds=[4]).runs[0]
    source = override(read_source("digits"), ["seed=4", f"name={run.key}", "engine={name='inline'}"])
    assert config_of(run.settings) == planned(read_config(source.values), source).config


def test_a_study_runs_every_run_in_one_process_unless_it_names_an_engine() -> None:
    given = load(base="cifar10/fedavg-dirichlet").runs[0]  # whose recipe names processes
    assert given.settings["engine"] == {"name": "inline", "threads": 1}
    assert load(threads=2).runs[0].settings["engine"] == {"name": "inline", "threads": 2}
    half = load(set={"engine.precision": "bf16"}).runs[0].settings["engine"]
    assert half == {"name": "inline", "threads": 1, "precision": "bf16"}
    kept = load(set={"engine.name": "processes", "engine.workers": 2}).runs[0].settings["engine"]
    assert kept == {"name": "processes", "workers": 2}
    base = {**read_source("digits").values, "engine": {"name": "vectorized", "group": 4}}
    assert load(base=base).runs[0].settings["engine"] == {"name": "vectorized", "group": 4}


def test_the_same_setting_written_differently_is_the_same_run() -> None:
    whole = load(set={"local.lr": 1}).runs[0]
    assert load(set={"local": {"lr": 1.0}}).runs[0].digest == whole.digest
    assert load(set={"local.lr": 1}, name="other").runs[0].digest == whole.digest
    assert load(set={"local.lr": 0.5}).runs[0].digest != whole.digest


def test_the_effective_rate_sets_the_rate_of_clients() -> None:
    """hsu2019 section 4.2: eta = effective * (1 - beta)."""
    plan = load(
        grid={"effective_lr": [0.1, 0.03]},
        methods={
            "a": {},
            "b": {"set": {"algorithm.name": "fedavgm"}, "grid": {"algorithm.momentum": [0.9, 0.99]}},
            "c": {"set": {"server": {"name": "momentum", "momentum": 0.5}}},
        },
    )
    rates = {(run.method, run.case["effective_lr"]): run.settings["local"]["lr"] for run in plan.runs}
    assert rates["a", 0.1] == 0.1
    assert rates["b momentum=0.9", 0.1] == 0.01
    assert rates["b momentum=0.99", 0.03] == 0.0003
    assert rates["c", 0.03] == 0.015
    for run in plan.runs:
        assert effective_rate(config_of(run.settings)) == run.case["effective_lr"]
    assert "sets local.lr, which is set too" in refused(grid={"effective_lr": [1.0], "local.lr": [0.1]})
    assert "must be a number above 0" in refused(grid={"effective_lr": [0]})


def test_a_function_is_named_so_that_other_processes_find_it() -> None:
    base = {**read_source("digits").values, "model": mlp}
    assert load(base=base).runs[0].settings["model"] == "fedlens.models.simple:mlp"
    with pytest.raises(ConfigError, match="cannot be imported by the processes that carry out the runs"):
        load(base={**base, "model": lambda input_shape, classes: None})


def test_a_function_of_the_script_is_refused_once_before_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_model(input_shape: Any, classes: int) -> None: ...

    own_model.__module__, own_model.__qualname__ = "__main__", "own_model"
    monkeypatch.setattr(sys.modules["__main__"], "own_model", own_model, raising=False)
    with pytest.raises(
        ConfigError, match=r"__main__:own_model cannot be imported .* to the top level of a module"
    ):
        load(base={**read_source("digits").values, "model": own_model})


def test_bases_may_differ_in_the_seed_that_no_run_has() -> None:
    other = {**read_source("digits").values, "seed": 9, "rounds": 7}
    plan = load(methods={"a": {}, "b": {"base": other}}, seeds=[2])
    assert [run.settings["seed"] for run in plan.runs] == [2, 2]


def test_random_points_are_the_same_for_the_same_seed_and_within_their_ranges() -> None:
    ranges = {"local.lr": {"low": 0.001, "high": 1.0, "log": True}, "local.epochs": {"low": 1, "high": 3}}
    cases = load(random={"number": 60, **ranges}).info({}).cases
    assert cases == load(random={"number": 60, **ranges}).info({}).cases
    assert cases != load(random={"number": 60, "seed": 1, **ranges}).info({}).cases
    rates = [case["local.lr"] for case in cases]
    assert all(0.001 <= rate <= 1.0 for rate in rates)
    assert 20 <= sum(rate < 0.0316 for rate in rates) <= 40  # half of the logarithms
    assert {case["local.epochs"] for case in cases} == {1, 2, 3}


def test_points_take_the_place_of_a_grid() -> None:
    points = [{"local.lr": 0.1, "local.epochs": 1}, {"local.lr": 0.3, "local.epochs": 2}]
    plan = load(methods={"a": {"points": points}})
    assert [(run.settings["local"]["lr"], run.settings["local"]["epochs"]) for run in plan.runs] == [
        (0.1, 1),
        (0.3, 2),
    ]
    assert "all points must have the same settings" in refused(
        methods={"a": {"points": [{"local.lr": 1}, {"rounds": 1}]}}
    )


def test_methods_that_see_other_data_are_refused_unless_the_study_says_so() -> None:
    for setting, value in [("data.partition.clients", 10), ("seeds.training", 3), ("data.normalize", "unit")]:
        methods = {"a": {}, "b": {"set": {setting: value}}}
        text = refused(methods=methods)
        assert f"the methods 'a' and 'b' differ in the data they see: {setting} is" in text
        assert "same_data = false" in text
        assert len(load(methods=methods, same_data=False).runs) == 2
    assert len(load(methods={"a": {}, "b": {"set": {"data.cache": 1.0, "local.lr": 0.3}}}).runs) == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"methods": {"a": {}, "b": {}}}, "the methods 'a' and 'b' have the same settings ([methods] b)"),
        ({"cases": {"a": {}, "b": {}}}, "the cases (case = a) and (case = b) of 'fedavg' have the same settings"),
        ({"grid": {"local.lr": [0.1]}, "methods": {"a": {"set": {"local.lr": 1}}}}, "a grid sets it again ([grid]"),
        ({"grid": {"local.lr": [0.1]}, "cases": {"a": {"set": {"local.lr": 1}}}}, "a grid sets it again ([grid]"),
        ({"set": {"local.lr": 1}, "grid": {"local.lr": [0.1]}}, "sets it again ([grid] local.lr) ([set] local.lr)"),
        ({"set": {"algorithm.momentum": 1}, "methods": {"a": MOMENTUM}}, "sets it again ([methods.a.grid]"),
        ({"grid": {"rounds": [1]}, "random": {"number": 1, "rounds": {"choices": [2]}}}, "both grid and random"),
        ({"methods": {"a": {"base": "digits"}}, "cases": {"b": {"base": "digits"}}}, "both name a base"),
        ({"baseline": "b", "methods": {"fedavgm": MOMENTUM}}, "the baseline 'b' is not a method of the study"),
        ({"figures": [{"kind": "setting", "x": "alfa"}]}, "the study has no dimension 'alfa' ([[figures]] 1 x)"),
        ({"tables": [{"kind": "sumary"}]}, "unknown kind of table 'sumary' ([[tables]] 1 kind); did you mean"),
        ({"metric": "test_acuracy"}, "no run measures 'test_acuracy' (metric); did you mean 'test_accuracy'"),
        ({"metric": "train_accuracy"}, "no run measures 'train_accuracy' (metric); set evaluation.train = true"),
        ({"metric": "validation_loss"}, "no run measures 'validation_loss' (metric); set data.validation above 0"),
        ({"metric": "clients_acc_mean"}, "(metric); did you mean 'clients_accuracy_mean'"),
        ({"metric": "test_mean_iou"}, "(metric); known: test_accuracy, test_accuracy_balanced"),
        (
            {"tables": [{"kind": "summary"}, {"kind": "summary", "name": "b", "metric": "test_los"}]},
            "no run measures 'test_los' ([[tables]] 2 metric); did you mean 'test_loss'",
        ),
        (
            {"figures": [{"kind": "curves", "metric": "local_los"}]},
            "no run measures 'local_los' ([[figures]] 1 metric); did you mean 'local_loss'",
        ),
        (
            {"last": 7, "set": {"evaluation.every": 10, "rounds": 55}},
            "'last' is 7, but a run of 55 rounds has 6 evaluations (evaluation.every = 10) (last); set last to at most "
            "6, or evaluation.every to at most 7",
        ),
        (
            {"tune": {}, "grid": {"local.lr": [1, 2]}, "stop": {"halving": 2, "first": 60}},
            "the first rung is round 60, but a run has 60 rounds, so halving would stop no run ([stop] first)",
        ),
        ({"tune": {}}, "[tune] has no setting to tune"),
        ({"tune": {"over": ["local.lr"]}, "grid": {"local.lrs": [1]}}, "'local.lr' is tuned, but is in no grid"),
    ],
)  # fmt: skip
def test_a_study_whose_parts_do_not_fit_is_refused(settings: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(**settings)


def test_metrics_and_evaluations_that_runs_have_are_accepted() -> None:
    for metric in ("test_accuracy", "test_loss", "clients_loss_worst_decile", "local_loss"):
        assert load(metric=metric).runs
    assert load(metric="train_loss", set={"evaluation.train": True}).runs
    assert load(metric="validation_loss", set={"data.validation": 0.1}).runs
    assert load(last=6, set={"evaluation.every": 10, "rounds": 55}).runs
    tune = {"seeds": [0], "refit": False}  # the final run of seed 0 is that of tuning
    assert load(grid={"local.lr": [0.1, 0.3]}, tune=tune, seeds=[0, 1]).runs


def test_a_metric_of_a_task_of_a_users_own_is_refused_after_the_first_run() -> None:
    own = load(metric="test_kapa", set={"task": {"name": f"{__name__}:Kappa"}}, seeds=[0, 1])
    run = own.runs[0]
    with pytest.raises(
        ConfigError, match=r"does not measure 'test_kapa' \(metric\); did you mean 'test_kappa'"
    ):
        own.refuse_unmeasured(line(run.digest, metric="test_kappa"))
    own.refuse_unmeasured(line(run.digest, metric="validation_kapa"))  # other runs may have it on test data
    own.refuse_unmeasured(replace(line(run.digest, metric="test_kappa"), status="failed"))
    listed = {"metric": "test_kapa", "set": {"task": {"name": f"{__name__}:ListedKappa"}}}
    assert "no run measures 'test_kapa' (metric); did you mean 'test_kappa'" in refused(**listed)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"algorithm.name": "centralized", "select.clients_per_round": 2},
            "'centralized' does not use the table [select] ([methods.other.set] select.clients_per_round)",
        ),
        (
            {"algorithm.name": "fedavgm", "algorithm.nesterov": True, "algorithm.momentum": 0},
            "nesterov needs a momentum above 0 ([methods.other.set] algorithm.nesterov)",
        ),
        (
            {"algorithm.name": "liadmm", "local.epochs": 1, "local.clip_norm": 1},
            "so local.clip_norm has no effect ([methods.other.set] local.clip_norm)",
        ),
        ({"algorithm.name": "fedbn"}, "no client holds out examples of its own (recipe digits"),
        ({"local.lr_warmup": 60}, "but the run has only 60 rounds"),
        ({"data.validation_from": "client"}, "needs `data.validation` above 0 ([methods.other.set] data.valid"),
    ],
)  # fmt: skip
def test_settings_that_an_algorithm_refuses_are_refused_before_the_runs(
    settings: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(methods={"fedavg": {}, "other": {"set": settings}}, same_data=False)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_plan_accepts_every_algorithm_that_fits_its_settings(name: str) -> None:
    few = {"local.epochs": 1} if "admm" in name else {}
    held_out = {"data.validation": 0.2, "data.validation_from": "client"}
    cut = {"name": name, "cut": 1}
    table = {"fedgkt": {**cut, "client": "mlp"}, "splitfed": cut, "split-relay": cut}
    chosen = {"algorithm": table.get(name, name), "local.lr": 5.0, **few, **held_out}
    if name == "vertical":
        chosen = {
            "algorithm": name,
            "local.lr": 5.0,
            "data.parties": {"split": "halves"},
        }
    assert len(load(methods={"one": {"set": chosen}}).runs) == 1


def test_the_layer_of_a_cut_is_one_of_the_real_model() -> None:
    chosen = {"model": "resnet20", "algorithm": {"name": "splitfed", "cut": "layer1"}}
    assert len(load(methods={"one": {"set": chosen}}).runs) == 1


def test_a_component_of_a_users_own_is_left_to_the_runs() -> None:
    assert len(load(set={"algorithm.name": "fedlens.algorithms.fedbn:fedbn"}).runs) == 1


def test_a_setting_of_the_study_may_be_the_grid_of_one_method_alone() -> None:
    plan = load(set={"local.lr": 0.3}, methods={"a": {"grid": {"local.lr": [0.1]}}, "b": {}})
    assert [run.settings["local"]["lr"] for run in plan.runs] == [0.1, 0.3]


def test_settings_are_checked_once_a_combination_and_not_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(run_settings, "plan", lambda *given: checked.append(1) or planned(*given))
    plan = load(
        seeds=list(range(10)),
        grid={"local.lr": [0.01 * k for k in range(1, 26)], "local.epochs": [1, 2]},
        methods={"a": {}, "b": {"set": {"algorithm.name": "fedavgm"}}},
    )
    assert len(plan.due({})) == 1000
    assert len(checked) == 100


def test_tuning_has_the_same_number_of_runs_for_every_method() -> None:
    tuned = {"grid": {"local.lr": [0.1, 0.3]}, "methods": {"fedavg": {}, "fedavgm": MOMENTUM}}
    text = refused(**tuned, tune={})
    assert "'fedavg' has 2 points with 1 seed, 2 tuning runs, but every method must have 4" in text
    plan = load(**tuned, seeds=[3, 4], tune={"budget": 12})
    assert plan.cells.tuning_seeds == {"fedavg": [100, 101, 102, 103, 104, 105], "fedavgm": [100, 101, 102]}
    assert plan.number_of_runs == {"tune": 24, "final": 4}
    assert plan.info({}).tuning["budget"] == 12
    kept = load(**tuned, seeds=[3, 4], tune={"budget": 12, "refit": False})
    assert kept.cells.tuning_seeds == {"fedavg": [3, 4, 100, 101, 102, 103], "fedavgm": [3, 4, 100]}
    assert kept.number_of_runs["final"] == 0
    assert "must be a multiple of the" in refused(**tuned, tune={"budget": 6})
    assert "must have 12" in refused(**tuned, tune={"budget": 12, "seeds": [7]})


def test_final_runs_follow_from_the_validation_values() -> None:
    plan = load(
        grid={"local.lr": [0.1, 0.3], "data.partition.clients": [5, 10]},
        seeds=[0, 1],
        tune={"seeds": [100], "share": 0.2},
    )
    tuning = plan.due({})
    assert {run.run.settings["data"]["validation"] for run in tuning} == {0.2}
    assert len(tuning) == 4
    best = {5: 0.3, 10: 0.1}
    lines = {
        due.run.digest: line(
            due.run.digest,
            float(due.run.point["local.lr"] == best[due.run.case["data.partition.clients"]]),
            "validation_accuracy",
        )
        for due in tuning
    }
    final = plan.due(lines)
    assert [(d.run.case["data.partition.clients"], d.run.point["local.lr"], d.run.seed) for d in final] == [
        (5, 0.3, 0), (5, 0.3, 1), (10, 0.1, 0), (10, 0.1, 1)
    ]  # fmt: skip
    assert all("validation" not in due.run.settings["data"] for due in final)
    assert plan.due(lines | {due.run.digest: line(due.run.digest) for due in final}) == []
    assert len(plan.info(lines).entries) == 8


def test_without_refit_a_tuning_run_is_a_final_run() -> None:
    plan = load(grid={"local.lr": [0.1, 0.3]}, seeds=[0, 1], tune={"refit": False})
    lines = {one.run.digest: line(one.run.digest, metric="validation_accuracy") for one in plan.due({})}
    assert plan.due(lines) == []
    entries = plan.info(lines).entries
    assert [(entry.role, entry.seed) for entry in entries] == [
        ("tune", 0), ("tune", 1), ("tune", 0), ("tune", 1), ("final", 0), ("final", 1)
    ]  # fmt: skip
