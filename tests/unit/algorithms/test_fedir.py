"""FedIR's settings: what is refused, where, and what a run tells of what left its clients."""

import json
from pathlib import Path

import pytest

from fedlens import Experiment
from fedlens.algorithms.fedir import DISCLOSURE, fedir, reweighted
from fedlens.algorithms.registry import ALGORITHMS, RULES
from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.cli.display.run_display import opening_lines
from fedlens.local.chain import chain
from fedlens.run.progress import ProgressBase
from tests.identity.identity_kit import parts, world

LOCAL = {"lr": 0.1}


@pytest.mark.parametrize("factory", [ALGORITHMS.find("fedir"), RULES.find("reweighted")])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("unifrom", "should be 'uniform', 'population', or a list of one probability a class"),
        ([0.5, 0.3], "the probabilities must sum to 1; they sum to 0.8"),
        ([1.5, -0.5], "probabilities must be at least 0"),
        ([], "sum to 0"),
        ([float("nan"), 1.0], "probabilities must be at least 0"),
    ],
)
def test_targets_that_are_none(factory, target, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings(factory, {"target": target}, "here")
    assert caught.value.where == "here.target"


@pytest.mark.parametrize(
    "target", ["uniform", "population", [0.2, 0.3, 0.5], [0, 0, 1], [1 / 3] * 3, [0.1] * 10]
)
def test_targets_that_are_one(target) -> None:
    assert read_settings(fedir, {"target": target}, "algorithm")["target"] == target


def test_a_target_of_another_number_of_classes_is_refused_before_anything_starts() -> None:
    there = world()
    with pytest.raises(ConfigError, match="has 2 probabilities, but the dataset has 3 classes") as caught:
        fedir(parts(there, LOCAL), target=[0.5, 0.5])
    assert caught.value.where == "algorithm.target"
    rule = chain(reweighted(target=[0.5, 0.5]))
    with pytest.raises(ConfigError, match="has 2 probabilities") as caught:
        ALGORITHMS.find("fedprox")(parts(there, LOCAL, client=rule))
    assert caught.value.where == "client.target"


def test_the_weights_are_there_once() -> None:
    with pytest.raises(ConfigError, match="'reweighted' is set twice"):
        fedir(parts(world(), LOCAL, client=reweighted()))


def small(tmp_path: Path, **more):
    made = Experiment(
        rounds=2,
        model="linear",
        data={"dataset": "digits", "partition": {"name": "shards", "clients": 6, "classes_per_client": 2}},
        local={"lr": 0.1},
        select={"clients_per_round": 2},
        **more,
    )
    told = Listening()
    return made.run(tmp_path / "run", progress=told), told.plan


class Listening(ProgressBase):
    def started(self, plan) -> None:
        self.plan = plan


@pytest.mark.report_page
@pytest.mark.parametrize("place", ["algorithm", "client"])
def test_a_run_tells_what_was_gathered_in_its_summary_its_report_and_before_it_starts(
    place: str, tmp_path
) -> None:
    name = {"algorithm": "fedir", "client": "reweighted"}[place]
    result, plan = small(tmp_path, **{place: {"name": name, "target": "population"}})
    assert json.loads((result.directory / "summary.json").read_text())["disclosures"] == [DISCLOSURE]
    page = (result.directory / "report.html").read_text()
    assert "What left the clients" in page
    assert "how many examples of each class" in page
    assert f"beyond model updates: {DISCLOSURE}" in opening_lines(plan)
    assert [line["clients"] for line in result.metrics] == [
        0,
        2,
        2,
    ]  # those that trained; all of them were asked once


@pytest.mark.report_page
@pytest.mark.parametrize(
    "more", [{"algorithm": {"name": "fedir"}}, {"algorithm": {"name": "centralized"}}, {}]
)
def test_a_run_that_gathers_nothing_says_nothing(more, tmp_path) -> None:
    if more.get("algorithm") == {"name": "centralized"}:
        made = Experiment(
            rounds=1,
            model="linear",
            data={"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
            local=LOCAL,
            **more,
        )
        result, told = made.run(tmp_path / "run", progress=(listening := Listening())), listening.plan
    else:
        result, told = small(tmp_path, **more)
    assert result.summary["disclosures"] == []
    assert "beyond model updates" not in (result.directory / "report.html").read_text()
    assert not any("beyond" in line for line in opening_lines(told))
