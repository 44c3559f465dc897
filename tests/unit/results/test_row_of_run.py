"""The line of a run in a study's results: sums up to each evaluation, the same however often the run was paused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment, load_result, resume
from fedlens.base.errors import FedlensError, RunDirectoryError
from fedlens.results.rows import failed_row, read_lines, row_of_run, write_lines
from fedlens.results.run import Run
from fedlens.studies.planned import PlannedRun

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 6}},
    "select": {"clients_per_round": 3},
    "evaluation": {"every": 2},
    "engine": "inline",
}
PLANNED = PlannedRun("fedavg", {}, {}, "final", 0, SETTINGS, "fedavg-seed0")
TIMES = ("seconds", "cpu_seconds")


def timeless(line: Any) -> dict[str, Any]:
    facts = {name: value for name, value in line.facts.items() if name not in TIMES}
    curve = {name: value for name, value in line.curve.items() if name != "elapsed"}
    return {**dataclasses.asdict(line), "facts": facts, "curve": curve}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Experiment(**SETTINGS).run(tmp_path_factory.mktemp("line") / "run", report=False).directory


def test_a_line_sums_examples_batches_and_bytes_up_to_each_evaluation(finished: Path) -> None:
    line, metrics = (
        row_of_run(Run.open(finished), PLANNED.digest, PLANNED.directory),
        load_result(finished).metrics,
    )
    assert (line.status, line.reason, line.rounds, line.main) == ("finished", None, 4, "test_accuracy")
    assert (line.digest, line.run) == (PLANNED.digest, PLANNED.directory)
    assert line.curve["round"] == [0, 2, 4]
    assert line.curve["examples"] == [sum(m["examples"] for m in metrics[: r + 1]) for r in (0, 2, 4)]
    assert line.curve["batches"] == [sum(m["batches_max"] for m in metrics[: r + 1]) for r in (0, 2, 4)]
    both = [m["bytes_up"] + m["bytes_down"] for m in metrics]
    assert line.curve["bytes"] == [sum(both[: r + 1]) for r in (0, 2, 4)]
    assert line.curve["bytes_client"] == [pytest.approx(sum(both[: r + 1]) / 3, rel=1e-6) for r in (0, 2, 4)]
    up = [sum(m["bytes_up"] for m in metrics[: r + 1]) for r in (0, 2, 4)]
    assert line.curve["bytes_client_up"] == [pytest.approx(each / 3, rel=1e-6) for each in up]
    assert line.curve["test_accuracy"] == [float(f"{metrics[r]['test_accuracy']:.7g}") for r in (0, 2, 4)]
    assert line.curve["local_loss"][0] is None
    assert {len(column) for column in line.curve.values()} == {3}


def test_a_line_has_the_facts_of_the_run_and_survives_the_file(finished: Path, tmp_path: Path) -> None:
    line = row_of_run(Run.open(finished), PLANNED.digest, PLANNED.directory)
    assert (line.facts["parameters"], line.facts["multiply_adds"], line.facts["clients"]) == (650, 640, 6)
    assert 0 < (line.facts["emd"] or 0) < 2
    assert all((line.facts[name] or 0) > 0 for name in TIMES)
    assert (line.facts["batch_size"], line.facts["chance"]) == (32, 0.1)
    assert (line.facts["local_lr"], line.facts["effective_lr"]) == (0.1, 0.1)
    write_lines(tmp_path / "results.jsonl", [line])
    assert read_lines(tmp_path / "results.jsonl") == [line]


def test_the_line_of_a_paused_run_is_stopped_and_of_a_resumed_one_that_of_an_unbroken_one(
    finished: Path, tmp_path: Path
) -> None:
    paused = Experiment(**SETTINGS).run(tmp_path / "run", report=False, until=3).directory
    line = row_of_run(Run.open(paused), PLANNED.digest, PLANNED.directory)
    assert (line.status, line.reason, line.rounds) == ("stopped", "paused after round 3", 3)
    assert line.curve["round"] == [0, 2]
    resume(paused, report=False)
    assert timeless(row_of_run(Run.open(paused), PLANNED.digest, PLANNED.directory)) == timeless(
        row_of_run(Run.open(finished), PLANNED.digest, PLANNED.directory)
    )


def test_the_line_of_a_failed_run_has_its_reason(tmp_path: Path) -> None:
    diverging = Experiment(**{**SETTINGS, "local": {"lr": 1e38}})
    with pytest.raises(FedlensError) as failure:
        diverging.run(tmp_path / "run", report=False)
    line = row_of_run(Run.open(tmp_path / "run"), PLANNED.digest, PLANNED.directory)
    assert (line.status, line.reason) == ("failed", str(failure.value))
    assert line.final("test_accuracy") is None
    early = failed_row(PLANNED.digest, PLANNED.directory, "no data")
    assert (early.status, early.reason, early.rounds, early.series("x")) == ("failed", "no data", 0, [])


def test_a_run_that_has_not_ended_has_no_line(finished: Path, tmp_path: Path) -> None:
    Experiment(**SETTINGS).run(tmp_path / "run", report=False, until=1)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match="has not ended"):
        row_of_run(Run.open(tmp_path / "run"), PLANNED.digest, PLANNED.directory)
