"""The loop over the rounds: what it writes down, when it measures, saves and gives up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fedlens import Experiment, resume
from fedlens.algorithms.averaging import Parts, averaging
from fedlens.base.errors import RunFailed
from fedlens.core.driver import Tally
from fedlens.core.protocol import Ask, Client, Outcome, Payload, Request
from fedlens.core.random import Rng
from fedlens.core.states import Saved
from fedlens.files import jsonl
from fedlens.run import checkpoint, run_saver
from fedlens.run.failed_round import diverged, no_accepted_update
from fedlens.run.progress import ProgressBase
from fedlens.run.run_state import RunState, replace_tensors

LEAST: dict[str, Any] = {
    "rounds": 4,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 6}, "validation": 0.1},
    "select": {"clients_per_round": 3},
}


class Listener(ProgressBase):
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def started(self, plan: dict[str, Any]) -> None:
        self.heard.append(("started", plan))

    def round_done(self, metrics: dict[str, Any]) -> None:
        self.heard.append(("round", metrics["round"]))

    def finished(self, summary: dict[str, Any]) -> None:
        self.heard.append(("finished", summary["status"]))


def test_a_line_a_round_and_what_is_in_it(tmp_path: Path) -> None:
    told = Listener()
    result = Experiment(**LEAST, evaluation={"every": 3}).run(tmp_path / "run", progress=told)
    metrics = ("loss", "accuracy", "accuracy_top5", "accuracy_balanced", "calibration_error")
    evaluated = {f"{on}_{metric}" for on in ("test", "validation") for metric in metrics}
    always = {
        "round", "local_loss", "clients", "failed", "examples", "batches_max", "bytes_up", "bytes_down", "seconds",
        "elapsed",
    }  # fmt: skip
    assert [set(line) - always for line in result.metrics] == [evaluated, set(), set(), evaluated, evaluated]
    assert all(always <= set(line) for line in result.metrics)
    start, first = result.metrics[:2]
    assert (start["clients"], start["examples"], start["local_loss"], start["bytes_up"]) == (0, 0, None, 0)
    size = 4 * (64 * 10 + 10)
    assert (first["clients"], first["failed"], first["batches_max"]) == (3, 0, 7)
    assert 3 * size <= first["bytes_up"] <= 3 * size + 3 * 8
    assert 3 * size <= first["bytes_down"] <= 3 * size + 3 * 8
    assert [name for name, _ in told.heard] == ["started", *["round"] * 5, "finished"]
    plan = told.heard[0][1]
    assert (plan["clients"], plan["clients_per_round"], plan["parameters"]) == (6, 3, 650)
    assert plan["directory"] == str(tmp_path / "run")


def test_the_best_round_is_chosen_on_validation_where_there_is_one(tmp_path: Path) -> None:
    for name, share, on in (("with", 0.1, "validation"), ("without", 0.0, "test")):
        result = Experiment(**LEAST).with_settings(f"data.validation={share}").run(tmp_path / name)
        best = result.summary["best"]
        values = [line[f"{on}_accuracy"] for line in result.metrics]
        assert (best["chosen_on"], best["metric"]) == (on, f"{on}_accuracy")
        assert best["value"] == max(values)
        assert best["round"] == values.index(max(values))
        kept = [path.name for path in (tmp_path / name / "checkpoint").iterdir()]
        assert f"round-{best['round']:06d}" in kept


def test_clients_are_recorded_when_asked_for(tmp_path: Path) -> None:
    Experiment(**LEAST, record={"clients": True}).run(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert Counter(row["round"] for row in rows) == {1: 3, 2: 3, 3: 3, 4: 3}
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    mine = [row for row in rows if row["round"] == 2]
    mean = sum(row["loss"] * row["examples"] for row in mine) / sum(row["examples"] for row in mine)
    assert mean == pytest.approx(lines[2]["local_loss"], rel=1e-12)
    Experiment(**LEAST).run(tmp_path / "without")
    assert not (tmp_path / "without/clients.jsonl").exists()


class Resting:
    """Trains every other round, asks nobody in between, and reports no loss."""

    def __init__(self, parts: Parts) -> None:
        self.inner = averaging(parts)

    @property
    def ops(self) -> Any:
        return {**self.inner.ops, "train": Quiet(self.inner.ops["train"])}

    def round(self, state: Any, ctx: Any) -> Any:
        if ctx.round % 2:
            state = yield from self.inner.round(state, ctx)
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Quiet:
    def __init__(self, train: Any) -> None:
        self.train = train

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        outcome = self.train(payload, client, rng)
        return Outcome(outcome.payload, None, {"examples": outcome.metrics["examples"]})


def test_a_round_that_asks_nobody_is_no_failure_and_no_loss_is_none(tmp_path: Path) -> None:
    result = Experiment(**LEAST, algorithm=Resting).run(tmp_path / "run")
    assert [line["clients"] for line in result.metrics] == [0, 3, 0, 3, 0]
    assert [line["local_loss"] for line in result.metrics] == [None] * 5
    assert result.metrics[1]["test_loss"] == result.metrics[2]["test_loss"]
    assert result.metrics[1]["examples"] > 0


class Breaks:
    """Evaluates well before the first round and then no more."""

    def __init__(self, parts: Parts) -> None:
        self.inner = averaging(parts)

    def evaluate(self, state: Any, ctx: Any) -> Any:
        metrics = yield from self.inner.evaluate(state, ctx)
        return metrics if ctx.round < 2 else {**metrics, "test_loss": float("nan")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_test_loss_that_is_no_number_is_a_warning_while_the_model_is_finite(tmp_path: Path) -> None:
    result = Experiment(**LEAST, algorithm=Breaks).run(tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert [line["test_loss"] is None for line in result.metrics] == [False, False, True, True, True]
    (warning,) = result.warnings
    assert (warning["kind"], warning["since"], warning["until"]) == ("loss-not-finite", 2, 4)


class Gone(Breaks):
    """From the second round on the model itself is not finite."""

    def round(self, state: Any, ctx: Any) -> Any:
        new = yield from self.inner.round(state, ctx)
        gone = {name: value * float("inf") for name, value in new["model"].items()}
        return new if ctx.round < 2 else {**new, "model": gone}


def test_a_model_that_is_not_finite_ends_the_run_before_it_counts(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=r"the loss of round 2 is not a finite number; usually the learning rate"
    ):
        Experiment(**LEAST, algorithm=Gone).run(tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["rounds_done"], summary["rounds"]) == ("failed", 1, 4)
    assert [warning["since"] for warning in summary["warnings"]] == [2]
    loaded = checkpoint.load_latest(tmp_path / "run/checkpoint")
    assert loaded is not None
    assert loaded.round == 1


class Boundless(Resting):
    """The sum of the clients' losses is not finite, though each of them is."""

    @property
    def ops(self) -> Any:
        return {**self.inner.ops, "train": LossOf(self.inner.ops["train"], 1e308)}


class LossOf(NamedTuple):
    train: Any
    loss: float

    def __call__(self, payload: Payload, client: Client, rng: Rng) -> Outcome:
        outcome = self.train(payload, client, rng)
        return Outcome(outcome.payload, None, {**outcome.metrics, "loss": self.loss})


def test_a_sum_of_losses_that_is_not_finite_ends_the_run_with_a_warning(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the loss of round 1 is not a finite number"):
        Experiment(**LEAST, algorithm=Boundless).run(tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (warning,) = summary["warnings"]
    assert (warning["kind"], warning["metric"], warning["since"]) == ("loss-not-finite", "local_loss", 1)


class Unwilling:
    """Refuses what comes from client 0, in words of its own."""

    def __init__(self, parts: Parts) -> None:
        self.inner = averaging(parts)

    def round(self, state: Any, ctx: Any) -> Any:
        answers = yield Ask("train", [Request(k) for k in (0, 1)], {"model": state["model"], "lr": 0.1})
        for answer in answers:
            if answer.client == 0:
                answer.refuse("not from there")
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_what_an_algorithm_refuses_is_counted_by_the_clients_name(tmp_path: Path) -> None:
    result = Experiment(**LEAST, algorithm=Unwilling, record={"clients": True}).run(tmp_path / "run")
    assert result.summary["failures"] == {"0": {"not from there": 4}}
    assert result.summary["totals"]["failed"] == 4
    rows = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert {"round": 3, "client": "0", "failure": "not from there", "times": 1} in rows


@pytest.mark.parametrize(("seconds", "kept"), [(0, [3, 4]), (3600, [4])])
def test_checkpoints_are_as_far_apart_as_asked_and_the_last_is_always_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: list[int]
) -> None:
    saved: list[int] = []
    real = checkpoint.save

    def save(directory: Path, round: int, *more: Any) -> Path:
        saved.append(round)
        return real(directory, round, *more)

    monkeypatch.setattr(checkpoint, "save", save)
    result = Experiment(**LEAST, checkpoint={"seconds": seconds}).run(tmp_path / "run")
    best = result.summary["best"]["round"]
    assert saved == ([1, 2, 3, 4] if seconds == 0 else sorted({best, 4}))
    left = {int(path.name[-6:]) for path in (tmp_path / "run/checkpoint").iterdir()}
    assert left == {*kept, best}


def test_a_standing_survives_a_checkpoint(tmp_path: Path) -> None:
    before = RunState(
        7,
        {"model": {"w": torch.ones(2)}, "server": {}},
        Saved({3: {"c": torch.zeros(1)}, "@train": {"optimizer": {"m": [torch.ones(1)]}}}, {4: "ab12"}),
        {"round": 7, "test_loss": 0.1},
        {"clients.jsonl": [{"round": 7, "client": "3"}]},
        {"divergence": {"levels": {}, "warnings": [{"since": 2}]}},
        {"round": 5, "metric": "test_accuracy", "value": 0.5, "chosen_on": "test"},
        {"3": Counter({"late": 2})},
        norms={"train": {"update": {"seen": 1, "every": 1, "norms": [0.5], "largest_median": 0.0}}},
    )
    checkpoint.save(tmp_path, 7, before.payload())
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    after = RunState.of(loaded.payload)
    assert (after.round, after.line, after.best) == (before.round, before.line, before.best)
    assert after.rows == {"metrics.jsonl": [before.line], **before.rows}
    assert (after.failures, after.norms, after.parts) == (before.failures, before.norms, before.parts)
    clients = after.clients.saved()
    assert list(clients.states) == [3, "@train"]
    assert torch.equal(clients.states[3]["c"], torch.zeros(1))
    assert clients.keys == {4: "ab12"}


def test_what_is_said_when_there_is_no_hope() -> None:
    tally = Tally()
    for client in (1, 2, 3):
        tally.failure(client, "update holds NaN or Inf" if client < 3 else "weight is 0, outside (0, 9]")
    high = "usually the learning rate is too high: local.lr is 0.5, try a tenth, or set local.clip_norm."
    assert (
        str(no_accepted_update(4, tally, 0.5))
        == f"no client update of round 4 was accepted: update holds NaN or Inf (2 of 3); {high}"
    )
    assert str(diverged(4, 0.5)) == f"the loss of round 4 is not a finite number; {high}"
    assert str(no_accepted_update(4, Tally(), 0.5)) == str(diverged(4, 0.5))


def test_failures_are_counted_once_however_often_a_run_is_resumed(tmp_path: Path) -> None:
    class Stop(ProgressBase):
        def round_done(self, metrics: dict[str, Any]) -> None:
            if metrics["round"] == 2:
                raise KeyboardInterrupt

    file = tmp_path / "own.py"
    file.write_text(
        "from tests.unit.run.test_runner import Unwilling\n\n"
        "def unwilling(parts):\n    return Unwilling(parts)\n"
    )
    experiment = Experiment(**LEAST, algorithm=f"{file}:unwilling")
    with pytest.raises(KeyboardInterrupt):
        experiment.run(tmp_path / "run", progress=Stop())
    assert json.loads((tmp_path / "run/summary.json").read_text())["failures"] == {"0": {"not from there": 2}}
    loaded = checkpoint.load_latest(tmp_path / "run/checkpoint")
    assert loaded is not None
    assert loaded.round == 2  # saved when it was stopped, long before its time
    assert resume(tmp_path / "run").summary["failures"] == {"0": {"not from there": 4}}


def test_the_best_round_of_a_heavy_model_waits_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever round it is, and whether the run is saved meanwhile or not: the same best model."""
    made = Experiment(**LEAST | {"local": {"lr": 3.0}, "rounds": 8}, checkpoint={"seconds": 1000})
    light = made.run(tmp_path / "light")
    assert 0 < light.summary["best"]["round"] < 8, "a run whose best round is its last says nothing here"
    saved: list[int] = []
    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a: (saved.append(a[1]), real(*a))[1])
    monkeypatch.setattr(run_saver, "_HEAVY", 1)
    append = jsonl.append
    kept: list[int] = []

    def appended(path: Path, rows: Any) -> bytes:
        kept.append(len(list((path.parent / "checkpoint").glob("round-*"))))
        return append(path, rows)

    monkeypatch.setattr(jsonl, "append", appended)
    heavy = made.run(tmp_path / "heavy")
    assert 0 < max(kept) <= 3, "those that a later one is better than go at once"
    assert heavy.summary["best"] == light.summary["best"]
    assert light.summary["best"]["round"] in saved[:-1]
    models = [(run.directory / "best.safetensors").read_bytes() for run in (light, heavy)]
    assert models[0] == models[1]


@pytest.mark.report_page
def test_a_run_without_a_report_leaves_everything_else(tmp_path: Path) -> None:
    written = Experiment(**LEAST).run(tmp_path / "with").directory
    skipped = Experiment(**LEAST).run(tmp_path / "without", report=False).directory
    assert {p.name for p in written.iterdir()} - {p.name for p in skipped.iterdir()} == {"report.html"}


@pytest.mark.report_page
def test_a_run_resumed_without_a_report_keeps_no_old_one(tmp_path: Path) -> None:
    class Stop(ProgressBase):
        def round_done(self, metrics: dict[str, Any]) -> None:
            if metrics["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Experiment(**LEAST).run(tmp_path / "run", progress=Stop())
    page = tmp_path / "run" / "report.html"
    assert page.exists()
    assert resume(tmp_path / "run", report=False).summary["status"] == "finished"
    assert not page.exists()


class Pair(NamedTuple):
    one: Any
    other: Any


def test_where_tensors_of_a_state_are_replaced_only_what_holds_them_is_rebuilt() -> None:
    old, new, kept = torch.zeros(2), torch.ones(2), torch.zeros(3)
    state = {"model": {"w": old}, "pair": Pair([old], 1), "rest": Counter(a=2), "plain": Pair(kept, (kept,))}
    found = replace_tensors(state, {id(old): new})
    assert found["model"]["w"] is new
    assert isinstance(found["pair"], Pair)
    assert found["pair"].one[0] is new
    assert all(found[name] is state[name] for name in ("rest", "plain"))
    assert state["model"]["w"] is old
