"""Rounds that are skipped: they leave every state as it was, are recorded, and end the run if they are too many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedlens import Experiment, Observer, Result, resume
from fedlens.aggregate.mean import Aggregate, Mean
from fedlens.algorithms.averaging import Parts, averaging
from fedlens.algorithms.scaffold import scaffold
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.cli.display.run_display import closing_lines, round_line
from fedlens.core.reduction import Refusal, Update
from fedlens.core.tree import map_tree, zeros_like
from fedlens.local.rules import ClientRule, ServerRule, Traits
from fedlens.observers.read_recordings import recorded_rounds
from fedlens.run import changes, checkpoint
from fedlens.run.rundir import RunDir
from fedlens.settings.config import read_config
from tests.unit.pages.reading import read_page
from tests.unit.run.test_runner import Boundless

pytestmark = pytest.mark.usefixtures("quick_workers")

HERE = "tests.unit.run.test_skipped_rounds"
LEAST: dict[str, Any] = {
    "rounds": 5,
    "model": "linear",
    "local": {"lr": 0.1, "steps": 2},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 6}},
    "select": {"clients_per_round": 3},
    "engine": "inline",
    "checkpoint": {"seconds": 0},
}
ENGINES = [
    "inline",
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("default", "auto", "vectorized", "processes", "ray")
    ),
]


@dataclass(frozen=True)
class Rejecting(Mean):
    """Rejects all replies of some rounds, or makes no update of some."""

    rejected: Sequence[int] = ()
    refused: Sequence[int] = ()
    follows_device: ClassVar[bool] = False

    def aggregate(self, answers: Any, fields: Any = None, ctx: Any = None) -> Any:
        if ctx.round in self.refused:
            return Refusal(f"{len(list(answers))} replies are too few")
        if ctx.round not in self.rejected:
            return super().aggregate(answers, fields, ctx)
        for answer in answers:
            answer.refuse("not today")
        return None


def rejecting(parts: Parts, *, rejected: list[int] = [], refused: list[int] = []) -> Any:  # noqa: B006
    made = scaffold(parts)
    return replace(made, aggregate=Rejecting(rejected=rejected, refused=refused))


def experiment(algorithm: str = "rejecting", max_skipped: int = 0, **how: Any) -> Experiment:
    more = {key: how.pop(key) for key in list(how) if key in LEAST or key in ("evaluation", "record")}
    table = {"name": f"{HERE}:{algorithm}", **how}
    return Experiment(**{**LEAST, "algorithm": table, "max_skipped": max_skipped, **more})


def payload(run: Result, round: int) -> dict[str, Any]:
    path = checkpoint.path_of(run.directory / "checkpoint", round)
    loaded: dict[str, Any] = checkpoint.load(path).payload
    return loaded


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["rejected", "refused"])
def test_a_skipped_round_leaves_the_model_and_all_states_as_they_were(
    engine: str, kind: str, tmp_path: Path
) -> None:
    """SCAFFOLD's clients and server hold control variates, whose sum would be wrong if only one side moved."""
    how = {kind: [4, 5]}
    run = experiment(max_skipped=2, engine=engine, **how).run(tmp_path / "run", report=False)
    before, after = payload(run, 4), payload(run, 5)
    shorter = experiment(max_skipped=2, engine=engine, rounds=3).run(tmp_path / "short", report=False)
    for saved in (before, after):
        assert equal(saved["state"], payload(shorter, 3)["state"])
        assert equal(saved["clients"], payload(shorter, 3)["clients"])
    assert (before["skipped"], after["skipped"]) == (1, 2)
    assert all("skipped" not in line for line in run.metrics[:4])
    four, five = run.metrics[4:]
    assert four["test_loss"] == five["test_loss"] == run.metrics[3]["test_loss"]
    if kind == "rejected":
        assert (four["clients"], four["failed"], four["local_loss"]) == (0, 3, None)
        assert four["skipped"] == "no client update of round 4 was accepted: not today (3 of 3)"
    else:
        assert (four["clients"], four["failed"]) == (3, 0)
        assert four["skipped"] == ("the aggregate Rejecting gave no update in round 4: 3 replies are too few")
    assert run.summary["status"] == "finished"


@pytest.mark.parametrize("kind", ["rejected", "refused"])
def test_training_continues_after_a_skipped_round_and_only_those_in_a_row_count(
    kind: str, tmp_path: Path
) -> None:
    run = experiment(max_skipped=1, **{kind: [1, 3, 5]}).run(tmp_path / "run", report=False)
    assert [line.get("skipped") is not None for line in run.metrics] == [
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert run.metrics[4]["test_loss"] < run.metrics[2]["test_loss"] < run.metrics[1]["test_loss"]
    assert run.summary["failures"].get("0", {}).get("not today", 0) <= 3


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("kind", ["rejected", "refused"])
def test_more_than_are_allowed_end_the_run(kind: str, most: int, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        experiment(max_skipped=most, **{kind: [2, 3, 4]}).run(tmp_path / "run", report=False)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["rounds_done"]) == ("failed", 1 + most)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "skipped" in line] == list(range(2, 2 + most))
    before = ("and no more", "; the round before it was skipped", "; the 2 rounds before it were skipped")[
        most
    ]
    assert (before in str(caught.value)) is (most > 0)
    assert f"round {2 + most}" in str(caught.value)


@pytest.mark.report_page
@pytest.mark.parametrize("kind", ["rejected", "refused"])
def test_the_page_and_the_closing_lines_say_which_rounds_were_skipped(kind: str, tmp_path: Path) -> None:
    run = experiment(max_skipped=2, **{kind: [2, 4, 5]}).run(tmp_path / "run")
    words = read_page((run.directory / "report.html").read_text()).words
    assert "Skipped rounds 3 rounds were skipped (2, 4, 5): no reply was accepted, or the aggregate" in words
    assert run.summary["totals"]["skipped"] == 3
    assert "3 rounds skipped" in closing_lines(dict(run.summary))[-1]
    assert ["skipped" in round_line(line, 5) for line in run.metrics] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("kind", ["rejected", "refused"])
def test_the_recording_of_a_skipped_round_is_complete(kind: str, tmp_path: Path) -> None:
    """Its model before is that after."""
    record = {"local_models": {"every": 1}, "updates": {"every": 1}}
    run = experiment(max_skipped=1, record=record, **{kind: [2]}).run(tmp_path / "run")
    recorded = recorded_rounds(RunDir(run.directory))
    assert [each.round for each in recorded] == [1, 2, 3, 4, 5]
    assert [len(each.replies) for each in recorded] == [3, 0 if kind == "rejected" else 3, 3, 3, 3]
    assert [equal(each.before(), each.after()) for each in recorded] == [False, True, False, False, False]


@pytest.mark.report_page
def test_nothing_is_said_of_skipped_rounds_where_there_are_none(tmp_path: Path) -> None:
    run = experiment(max_skipped=2).run(tmp_path / "run")
    words = read_page((run.directory / "report.html").read_text()).words
    assert "Skipped rounds" not in words
    assert "were skipped" not in words
    assert "skipped" not in closing_lines(dict(run.summary))[-1]


def test_what_is_heard_of_a_skipped_round_and_what_observers_get(tmp_path: Path) -> None:
    class Seen(Observer):
        def __init__(self) -> None:
            self.states: dict[int, Any] = {}
            self.problems: list[str] = []

        def problem(self, text: str) -> None:
            self.problems.append(text)

        def released(self, round: int, state: Any, tally: Any) -> None:
            self.states[round] = state["model"]

    seen = Seen()
    experiment(max_skipped=1, rejected=[2]).run(tmp_path / "run", progress=seen, report=False)
    assert seen.problems == [
        "round 2 was skipped: no client update of round 2 was accepted: not today (3 of 3)"
    ]
    assert equal(seen.states[2], seen.states[1])
    assert not equal(seen.states[3], seen.states[1])


@pytest.mark.parametrize("kind", ["rejected", "refused"])
def test_a_resumed_run_counts_on_and_ends_where_the_whole_one_does(kind: str, tmp_path: Path) -> None:
    made = experiment(max_skipped=2, **{kind: [2, 3, 5]})
    whole = made.run(tmp_path / "whole", report=False)
    made.run(tmp_path / "cut", report=False, until=2)
    again = resume(tmp_path / "cut", report=False)
    skipped = [[line.get("skipped") for line in run.metrics] for run in (whole, again)]
    assert skipped[0] == skipped[1]
    models = [(run.directory / "model.safetensors").read_bytes() for run in (whole, again)]
    assert models[0] == models[1]
    too_many = experiment(max_skipped=1, **{kind: [2, 3, 4]})
    too_many.run(tmp_path / "failing", report=False, until=2)
    with pytest.raises(RunFailed, match=r"round 3.*the round before it was skipped"):
        resume(tmp_path / "failing", report=False)
    # With a larger number the same run goes on: it is no setting that numbers depend on.
    text = (tmp_path / "failing/config.toml").read_text()
    (tmp_path / "failing/config.toml").write_text(text.replace("max_skipped = 1", "max_skipped = 3"))
    assert resume(tmp_path / "failing", report=False).summary["status"] == "finished"


def test_beside_the_next_round_the_right_round_is_skipped(tmp_path: Path) -> None:
    how = {"engine": {"name": "processes", "workers": 2}, "evaluation": {"overlap": True}}
    run = experiment(max_skipped=1, rejected=[2, 4], **how).run(tmp_path / "run", report=False)
    plain = experiment(max_skipped=1, rejected=[2, 4]).run(tmp_path / "plain", report=False)
    for one, other in zip(run.metrics, plain.metrics, strict=True):
        assert {k: v for k, v in one.items() if k not in ("seconds", "elapsed")} == {
            k: v for k, v in other.items() if k not in ("seconds", "elapsed")
        }


class Drifting:
    """Moves the model in each round, whatever is accepted; rejects all replies of round 2."""

    def __init__(self, parts: Parts) -> None:
        self.inner = averaging(parts, aggregate=Rejecting(rejected=[2]))

    def round(self, state: Any, ctx: Any) -> Any:
        new = yield from self.inner.round(state, ctx)
        return {**new, "model": {name: 2 * value for name, value in new["model"].items()}}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_whatever_an_algorithm_makes_of_no_replies_the_state_stays(tmp_path: Path) -> None:
    settings = {**LEAST, "algorithm": Drifting, "max_skipped": 1, "rounds": 3}
    run = Experiment(**settings).run(tmp_path / "run", report=False)
    one, two, three = (line["test_loss"] for line in run.metrics[1:])
    assert one == two != three


def test_a_loss_that_is_not_finite_is_not_skipped(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the loss of round 1 is not a finite number"):
        Experiment(**{**LEAST, "algorithm": Boundless, "max_skipped": 3}).run(tmp_path / "run")


@dataclass(frozen=True)
class Noise(Rejecting):
    """Adds the same to the mean of each round, and makes an update of it where there is no reply."""

    asked_without_replies: ClassVar[bool] = True

    def init(self, weights: Any, federation: Any) -> Any:
        return {"zero": zeros_like(weights), "rounds": 0}

    def aggregate(self, answers: Any, fields: Any = None, ctx: Any = None) -> Any:
        mean = super().aggregate(answers, fields, ctx)
        update = ctx.state["zero"] if mean is None else mean.update
        noisy = map_tree(lambda value: value + 0.5, update)
        rest = ({}, {}) if mean is None else (mean.buffers, mean.counters)
        return Update(noisy, *rest, state={**ctx.state, "rounds": ctx.state["rounds"] + 1})


class Resting:
    """Nobody in round 3, and otherwise the first three clients."""

    def cohort(self, ctx: Any) -> list[int]:
        return [] if ctx.round == 3 else [0, 1, 2]

    def size(self, federation: Any) -> int:
        return 3


def noisy(parts: Parts) -> Any:
    return averaging(parts, aggregate=Noise(rejected=[2]), select=Resting())  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_that_adds_noise_is_asked_in_every_round(engine: str, tmp_path: Path) -> None:
    """Round 2 has no accepted reply, and in round 3 nobody is asked: both move the model by the noise."""
    settings = {**LEAST, "algorithm": f"{HERE}:noisy", "engine": engine, "rounds": 4}
    settings.pop("select")
    states: dict[int, Any] = {}

    class Releasing(Observer):
        def released(self, round: int, state: Any, tally: Any) -> None:
            states[round] = state

    run = Experiment(**settings).run(tmp_path / "run", progress=Releasing(), report=False)
    assert [line["clients"] for line in run.metrics] == [0, 3, 0, 0, 3]
    assert all("skipped" not in line for line in run.metrics)
    for round in (2, 3):
        before, after = states[round - 1]["model"], states[round]["model"]
        moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
        torch.testing.assert_close(moved, torch.full_like(moved, -0.5))
    assert [states[round]["aggregate"]["rounds"] for round in range(5)] == [0, 1, 2, 3, 4]
    assert run.metrics[3]["bytes_down"] == 0


def _add_half(state: Any, update: Update, ctx: Any) -> Any:
    ctx.metrics["released"] = float(update.replies)
    noisy = map_tree(lambda value: value + 0.5, update.update)
    return {"rounds": state["rounds"] + 1}, replace(update, update=noisy)


def releasing(parts: Parts) -> Any:
    server_rule = ServerRule(
        init=lambda weights, federation: {"rounds": 0},
        after=_add_half,
        spent=lambda state: [{"round": state["rounds"]}],
    )
    rule = ClientRule(name="releasing", server_rules={"noise": server_rule}, traits=Traits(releases=True))
    return averaging(parts, client=rule, select=Resting())


def test_a_client_rule_that_releases_noise_gets_a_zero_for_a_round_without_replies(tmp_path: Path) -> None:
    """In round 3 nobody is asked: the model moves by the noise, and the round is not skipped."""
    settings = {**LEAST, "algorithm": f"{HERE}:releasing", "rounds": 4}
    settings.pop("select")
    states: dict[int, Any] = {}
    made: list[Any] = []

    class Releasing(Observer):
        def began(self, run: Any) -> None:
            made.append(run.built.algorithm)

        def released(self, round: int, state: Any, tally: Any) -> None:
            states[round] = state

    run = Experiment(**settings).run(tmp_path / "run", progress=Releasing(), report=False)
    assert [line["clients"] for line in run.metrics] == [0, 3, 3, 0, 3]
    assert [line.get("released") for line in run.metrics] == [None, 3.0, 3.0, 0.0, 3.0]
    before, after = states[2]["model"], states[3]["model"]
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
    torch.testing.assert_close(moved, torch.full_like(moved, -0.5))
    assert [made[0].spent(states[round]) for round in range(5)] == [[{"round": n}] for n in range(5)]
    assert not made[0].needs_replies


def test_a_rule_that_adds_noise_is_refused_where_a_round_may_end_before_it_is_asked(tmp_path: Path) -> None:
    settings = {**LEAST, "algorithm": "feddane", "aggregate": f"{HERE}:Noise"}
    with pytest.raises(ConfigError, match="must be asked in every round"):
        Experiment(**settings).run(tmp_path / "run")
    assert not Aggregate.asked_without_replies


def test_it_is_a_setting_that_changes_no_number() -> None:
    with pytest.raises(ConfigError, match="max_skipped"):
        Experiment(**LEAST, max_skipped=-1)
    config = read_config({**LEAST, "model": {"name": "linear"}, "max_skipped": 3})
    assert "max_skipped" not in changes.defining(config)
