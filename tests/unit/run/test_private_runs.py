"""Runs with `[privacy]`: what they record, what they keep to themselves, and what they refuse."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedlens import Experiment, Result, resume
from fedlens.algorithms.registry import ALGORITHMS, AlgorithmEntry
from fedlens.base.errors import ConfigError
from fedlens.cli.display.run_display import closing_lines, round_line
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.driver import Tally
from fedlens.run import checkpoint
from fedlens.run.private_rounds import PrivateRounds
from fedlens.run.rundir import RunDir
from fedlens.settings.algorithm_check import check_algorithm, check_privacy
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan

pytestmark = pytest.mark.usefixtures("few_orders")

PRIVACY: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 1.0, "delta": 1e-3}
LEAST: dict[str, Any] = {
    "rounds": 4,
    "model": "linear",
    "local": {"lr": 0.1, "steps": 2},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 60}, "normalize": "unit"},
    "select": {"name": "poisson", "fraction": 0.5},
    "privacy": PRIVACY,
    "engine": "inline",
    "checkpoint": {"seconds": 0},
}
PUBLIC = {
    "clip",
    "epsilon",
    "round",
    "test_loss",
    "test_accuracy",
    "test_accuracy_top5",
    "test_accuracy_balanced",
}


def run(path: Path, **changes: Any) -> Result:
    return Experiment(**{**LEAST, **changes}).run(out=path, report=False)


def lines(path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_who_took_part_is_in_no_file_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = run(path, rounds=6)
    for line in lines(path):
        assert {name for name in line if not name.startswith("test_calibration")} <= PUBLIC
    hidden = lines(path, "private.jsonl")
    assert [row["round"] for row in hidden] == [1, 2, 3, 4, 5, 6]
    assert len({len(row["replied"]) for row in hidden}) > 1
    assert all(0 < norm <= 0.5 for row in hidden for _, norm in row["norms"])
    assert stat.S_IMODE((path / "private.jsonl").stat().st_mode) == 0o600
    summary = json.loads((path / "summary.json").read_text())
    assert {
        name: summary["totals"][name] for name in ("clients", "bytes_up", "seconds", "cpu_seconds")
    } == dict.fromkeys(("clients", "bytes_up", "seconds", "cpu_seconds"))
    assert (summary["failures"], summary["traffic"]["clients"], summary["warnings"]) == ({}, {}, [])
    loaded = checkpoint.load_latest(path / "checkpoint")
    assert loaded is not None
    told = {name: loaded.payload[name] for name in ("norms", "failures", "clients", "cpu_seconds", "skipped")}
    assert told == {"norms": {}, "failures": {}, "clients": {}, "cpu_seconds": 0.0, "skipped": 0}
    assert loaded.payload["traffic"]["clients"] == {}
    assert loaded.payload["line"] == lines(path)[-1]
    assert "None" not in " ".join([*closing_lines(summary), *(round_line(line, 6) for line in lines(path))])
    assert result.directory == path


def test_a_private_run_is_resumed_with_new_cohorts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    Experiment(**LEAST).run(out=path, report=False, until=2)
    resume(path)
    assert [line["round"] for line in lines(path)] == [0, 1, 2, 3, 4]
    assert [row["round"] for row in lines(path, "private.jsonl")] == [1, 2, 3, 4]
    again = tmp_path / "again"
    run(again)
    assert lines(again, "private.jsonl")[0]["replied"] != lines(path, "private.jsonl")[0]["replied"]


def test_the_loss_in_a_secure_sum_is_not_recorded(tmp_path: Path) -> None:
    sums = {"name": "secagg", "weighting": "uniform", "bits": 20}
    select = {"name": "uniform", "clients_per_round": 5}
    run(tmp_path / "run", aggregate=sums, select=select, rounds=2)
    assert all(
        {"local_loss", "loss", "examples", "batches"}.isdisjoint(line) for line in lines(tmp_path / "run")
    )
    assert [len(row["replied"]) for row in lines(tmp_path / "run", "private.jsonl")] == [5, 5]
    run(tmp_path / "seeded", aggregate=sums, select=select, rounds=2, privacy={**PRIVACY, "noise": "seeded"})
    assert all("local_loss" not in line for line in lines(tmp_path / "seeded"))


def test_a_private_run_does_not_end_for_a_loss_in_a_secure_sum(tmp_path: Path) -> None:
    """A loss that is not finite ends a run (`SkippedRounds`), and here it would tell of one client."""
    built: Any = SimpleNamespace(
        config=read_config(LEAST),
        algorithm=SimpleNamespace(private=True),
        partition=SimpleNamespace(ids=["a", "b"]),
    )
    sums = {"loss": math.inf, "examples": 20.0, "batches": 4.0, "clip": 0.5}
    kept = PrivateRounds(built, RunDir(tmp_path)).kept(1, Tally(), sums, 1.0)
    assert kept.sums == {"clip": 0.5}


@pytest.mark.report_page
def test_the_page_of_a_private_run_is_made(tmp_path: Path) -> None:
    Experiment(**LEAST).run(out=tmp_path / "run")
    page = (tmp_path / "run/report.html").read_text()
    assert "Poisson" in page or "poisson" in page
    assert "The messages are left out: they tell how many clients took part" in page


def test_with_seeded_noise_a_run_repeats_and_records_all_but_the_local_loss(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, privacy={**PRIVACY, "noise": "seeded"})
    a, b = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [line["test_loss"] for line in a] == [line["test_loss"] for line in b]
    assert all("local_loss" not in line and line["clients"] > 0 for line in a[1:])
    assert not (tmp_path / "a/private.jsonl").exists()
    notes = " ".join(json.loads((tmp_path / "a/summary.json").read_text())["notes"])
    assert "promises nothing: who knows the seed subtracts the noise" in notes


def test_an_unsafe_run_records_everything_and_says_so(tmp_path: Path) -> None:
    run(tmp_path / "run", record={"unsafe": True, "clients": True})
    assert all(line["local_loss"] > 0 for line in lines(tmp_path / "run")[1:])
    assert len(lines(tmp_path / "run", "clients.jsonl")) > 20
    assert not (tmp_path / "run/private.jsonl").exists()
    notes = json.loads((tmp_path / "run/summary.json").read_text())["notes"]
    assert any(note.startswith("not private: record.unsafe") for note in notes)


def test_the_clip_of_each_round_is_recorded(tmp_path: Path) -> None:
    adaptive = {**PRIVACY, "clip": "adaptive", "noise": "seeded"}
    run(tmp_path / "run", privacy=adaptive, select={"name": "poisson", "fraction": 0.9})
    rows = lines(tmp_path / "run")[1:]
    assert rows[0]["clip"] == 0.1
    assert len({row["clip"] for row in rows}) == 4
    assert all(-0.5 < row["unclipped"] < 1.5 for row in rows)


def test_no_norm_of_other_clients_rejects_an_update(tmp_path: Path) -> None:
    """One client decides nothing about another: there is no bound from the norms of earlier replies."""
    run(tmp_path / "run", privacy={**PRIVACY, "noise": "seeded"}, rounds=3)
    loaded = checkpoint.load_latest(tmp_path / "run/checkpoint")
    assert loaded is not None
    assert loaded.payload["norms"] == {}


# -- what is refused -------------------------------------------------------------------------------------------


TREE = {**PRIVACY, "mechanism": "tree"}
ONCE = {"name": "once-each", "clients_per_round": 20}
GROUP = {"name": "small-cnn", "width": 2, "norm": "group"}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "clip of 0": ({"privacy": {**PRIVACY, "clip": 0}}, "privacy.clip", "greater than 0"),
    "clip of no kind": ({"privacy": {**PRIVACY, "clip": "median"}}, "privacy.clip", "adaptive"),
    "delta of 1": ({"privacy": {**PRIVACY, "delta": 1.0}}, "privacy.delta", "less than 1"),
    "floor without adaptive": ({"privacy": {**PRIVACY, "clip_floor": 1e-3}}, "privacy", "are of an adaptive clip"),
    "batch norm": ({"model": {**GROUP, "norm": "batch"}}, "model", "model.norm = 'group'"),
    "weights by examples": ({"aggregate": "mean"}, "aggregate", "weighting = 'uniform'"),
    "weights by tau": ({"algorithm": "fednova"}, "aggregate", "uniform mean"),
    "weights by validation": ({"aggregate": {"name": "optimal-convex", "on": "test"}}, "aggregate", "uniform mean"),
    "secure sums by examples": (
        {"aggregate": {"name": "quantized", "range": 10.0}}, "aggregate", "aggregate.weighting = 'uniform'",
    ),
    "selection by size": ({"select": "by-size"}, "select.name", "poisson"),
    "fixed selection": ({"select": {"name": "fixed", "clients": [1]}}, "select.name", "not known for"),
    "small cohort": (
        {"privacy": {**PRIVACY, "clip": "adaptive"}, "select": {"name": "poisson", "fraction": 0.1}},
        "privacy.clip",
        "more than 10 clients",
    ),
    "stragglers": ({"local": {"lr": 0.1, "steps": 4, "stragglers": 0.5}}, "local.stragglers", "others take part"),
    "validation": ({"data": {**LEAST["data"], "validation": 0.1}}, "data.validation", "test data measure"),
    "training data": ({"evaluation": {"train": True}}, "evaluation.train", "has no noise"),
    "lines by client": ({"record": {"clients": True}}, "record.clients", "record.unsafe = true"),
    "local models": ({"record": {"local_models": {"every": 1}}}, "record.local_models", "record.unsafe"),
    "updates": ({"record": {"updates": {"every": 1}}}, "record.updates", "record.unsafe"),
    "unsafe alone": ({"privacy": None, "record": {"unsafe": True}}, "record.unsafe", "recorded anyway"),
    "counts of classes": (
        {"algorithm": {"name": "fedir", "target": "population"}}, "algorithm.name", "asks for or keeps more",
    ),
    "a tree that asks twice": (
        {"privacy": {**TREE, "restart_every": 4}, "select": ONCE},
        "privacy.restart_every",
        "asks a client twice: all 60 have been asked after 3 rounds of 20",
    ),
    "a tree of drawn clients": ({"privacy": TREE}, "select.name", "Poisson may ask one twice.*once-each"),
    "a tree of all clients": ({"privacy": TREE, "select": "all"}, "select.name", "Everyone may ask one twice"),
    "a tree under an adaptive clip": (
        {"privacy": {**TREE, "clip": "adaptive"}, "select": ONCE}, "privacy", "a number as clip",
    ),
    "a tree of examples": ({"privacy": {**TREE, "unit": "example"}, "select": ONCE}, "privacy", "unit = 'client'"),
    "restarts without a tree": ({"privacy": {**PRIVACY, "restart_every": 4}}, "privacy", "mechanism = 'tree'"),
    "once each without a tree": ({"select": ONCE}, "select.name", "not known for"),
    "another rule": ({"client": "control-variate"}, "algorithm.name", "asks for or keeps more"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_the_promise_is_refused_with_a_hint(case: str, tmp_path: Path) -> None:
    changes, where, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text) as error:
        run(tmp_path / "run", **changes)
    assert str(error.value.where).startswith(where)
    assert not (tmp_path / "run").exists()


def test_moments_of_the_clients_images_are_refused() -> None:
    config = read_config({**LEAST, "data": {**LEAST["data"], "normalize": "standard"}})
    with pytest.raises(ConfigError, match="which have no noise"):
        check_privacy(config, AlgorithmBase, moments_of=100)  # type: ignore[arg-type]


PRIVATE = {"fedavg", "fedavgm", "fedprox", "fedir", "fedvc", "fedadagrad", "fedadam", "fedyogi", "moon"}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_an_algorithm_keeps_the_promise_or_is_refused(name: str) -> None:
    entry = ALGORITHMS.entries[name]
    stand_in = dict(entry.stand_in) if isinstance(entry, AlgorithmEntry) else {}
    values = {**LEAST, "algorithm": {"name": name, **stand_in}}
    if name == "vertical":
        values["data"] = {"dataset": "digits", "parties": {"split": "halves"}}
    if name in ("dsgd", "push-sum", "gradient-tracking", "centralized", "vertical"):
        del values["select"]
    if name in ("fedvc", "gradient-tracking"):
        values["local"] = {"lr": 0.1}
    planned = plan(read_config(values), Source(values))
    if name in PRIVATE:
        check_algorithm(planned)
    else:
        with pytest.raises(ConfigError):
            check_algorithm(planned)


def test_a_delta_of_one_in_the_number_of_clients_is_warned_of(tmp_path: Path) -> None:
    run(tmp_path / "run", privacy={**PRIVACY, "delta": 1 / 60}, rounds=1)
    notes = json.loads((tmp_path / "run/summary.json").read_text())["notes"]
    assert any("is no promise to 60 clients" in note for note in notes)
