"""The results of each client by name, from the rows that a run records to the worst client on page and terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens import Experiment, Result, resume
from fedlens.base.errors import RunDirectoryError
from fedlens.cli.display.client_table import client_lines, worst_text
from fedlens.data.partition.partition import Partition
from fedlens.pages.run_page import measuring_command, write_report
from fedlens.results.client_results import (
    ClientHistories,
    WorstClients,
    client_results,
    references,
    same_clients,
    with_references,
    worst_clients,
)
from fedlens.results.run import read_run
from fedlens.run.progress import ProgressBase
from tests.unit.pages.reading import assert_self_contained, read_page
from tests.unit.results.fake_run import class_counts, line, make_partition, make_run

pytestmark = pytest.mark.usefixtures("quick_workers")

NAMES = ("mercy", "bonn", "celle", "aachen", "emden")


def hospitals(table: Any, seed: int) -> Any:
    """Clients of very different sizes, whose names are not their rows."""
    owners = np.minimum(np.arange(len(table)) // 120, 4)
    return replace(Partition.of_owners(owners, 5), ids=NAMES)


def experiment(**changed: Any) -> Experiment:
    data = {"dataset": "digits", "partition": hospitals, "validation": 0.2, "validation_from": "client"}
    settings: dict[str, Any] = {
        "rounds": 3,
        "model": "linear",
        "local": {"lr": 0.1},
        "data": data | changed.pop("data", {}),
        "select": {"clients_per_round": 3},
        "evaluation": {"clients": "all"} | changed.pop("evaluation", {}),
        "engine": "inline",
    }
    return Experiment(**(settings | changed))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Result]:
    """One run of each of the algorithms that are compared client by client."""
    root = tmp_path_factory.mktemp("runs")
    made = {}
    for name in ("fedavg", "centralized", "local-only", "finetune"):
        more = {"select": None} if name == "centralized" else {}
        made[name] = experiment(algorithm=name, **more).run(root / name)
    return made


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (result.directory / "clients.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["fedavg", "centralized", "local-only", "finetune"])
def test_the_rows_reproduce_the_metrics_over_clients_exactly(runs: Mapping[str, Result], name: str) -> None:
    rows = rows_of(runs[name])
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in range(4) for c in NAMES]
    for metrics in runs[name].metrics:
        mine = [row for row in rows if row["round"] == metrics["round"]]
        for metric in ("accuracy", "loss"):
            values = [row[f"validation_{metric}"] for row in mine]
            assert metrics[f"clients_{metric}_mean"] == float(np.sort(values).mean())
            assert metrics[f"clients_{metric}_std"] == float(np.sort(values).std())
        if name == "finetune":  # there the pooled metrics are those of the model before tuning
            before = [row["validation_accuracy_before"] for row in mine]
            assert metrics["clients_accuracy_mean_before"] == float(np.sort(before).mean())
            continue
        n = np.array([row["validation_examples"] for row in mine])
        right = sum(round(row["validation_accuracy"] * row["validation_examples"]) for row in mine)
        assert metrics["validation_accuracy"] == right / n.sum()
        pooled = n @ [row["validation_loss"] for row in mine] / n.sum()
        assert metrics["validation_loss"] == pytest.approx(pooled, rel=1e-6)


def test_only_the_files_of_clients_get_the_rows(runs: Mapping[str, Result]) -> None:
    keys = {
        "round", "client", "validation_examples", "validation_loss", "validation_accuracy", "validation_accuracy_top5",
        "validation_accuracy_balanced", "validation_calibration_error",
    }  # fmt: skip
    assert {key for row in rows_of(runs["fedavg"]) for key in row} == keys
    tuned = {f"{key}_before" for key in keys - {"round", "client", "validation_examples"}}
    assert {key for row in rows_of(runs["finetune"]) for key in row} == keys | tuned
    lines = {key for result in runs.values() for row in result.metrics for key in row}
    assert not any("examples" in key and key != "examples" for key in lines)


@pytest.mark.parametrize("overlap", [False, True])
def test_workers_and_evaluation_beside_a_round_write_the_same_rows(
    tmp_path: Path, runs: Mapping[str, Result], overlap: bool
) -> None:
    engine = {"name": "processes", "workers": 2, "threads": 1}
    made = experiment(algorithm="local-only", engine=engine, evaluation={"overlap": overlap})
    result = made.run(tmp_path / "run", report=False)
    assert rows_of(result) == rows_of(runs["local-only"])


def test_training_rows_and_measured_rows_stand_beside_each_other(
    tmp_path: Path, runs: Mapping[str, Result]
) -> None:
    result = experiment(record={"clients": True}).run(tmp_path / "run", report=False)
    rows = rows_of(result)
    assert [row for row in rows if "validation_examples" in row] == rows_of(runs["fedavg"])
    assert sum("batches" in row for row in rows) == 3 * 3
    assert [vars(row) for row in client_results(read_run(result.directory))] == runs["fedavg"].clients


class Stops(ProgressBase):
    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            raise KeyboardInterrupt


def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(
    tmp_path: Path, runs: Mapping[str, Result]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        experiment().run(run, progress=Stops(), report=False)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["clients"]["round"]) == ("interrupted", 2)
    file = run / "clients.jsonl"
    whole = (runs["fedavg"].directory / "clients.jsonl").read_text()
    # A kill can cut the rows of the last round, and those of the round after it.
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:12]) + '{"round": 3, "cl')
    result = resume(run, report=False)
    assert file.read_text() == whole
    assert result.summary["clients"] == runs["fedavg"].summary["clients"]


def test_a_drawn_few_are_compared_with_those_of_their_round(tmp_path: Path) -> None:
    result = experiment(evaluation={"clients": 2}).run(tmp_path / "run", report=False)
    rows = rows_of(result)
    assert [sum(row["round"] == at for row in rows) for at in range(4)] == [2] * 4
    by_round = {at: [r["validation_accuracy"] for r in rows if r["round"] == at] for at in range(4)}
    results = client_results(read_run(result.directory))
    assert sorted(row.client for row in results) == sorted(NAMES)
    for found in results:
        mine = [row for row in rows if row["client"] == found.client]
        if not mine:
            assert (found.held_out, found.first, found.last, found.gap, found.round) == (
                0,
                None,
                None,
                None,
                None,
            )
            continue
        last = mine[-1]
        assert (found.round, found.last) == (last["round"], last["validation_accuracy"])
        assert found.gap == pytest.approx(found.last - np.mean(by_round[last["round"]]))
    measured = [row.last is not None for row in results]
    assert measured == sorted(measured, reverse=True)
    assert result.summary["clients"]["measured"] == 2


def test_each_client_has_its_sizes_its_classes_and_its_course(runs: Mapping[str, Result]) -> None:
    run = read_run(runs["fedavg"].directory)
    results = client_results(run)
    assert [row.last for row in results] == sorted(row.last for row in results)
    assert run.partition is not None
    rows, mean = rows_of(runs["fedavg"]), runs["fedavg"].metrics[-1]["clients_accuracy_mean"]
    for found in results:
        k = NAMES.index(found.client)
        course = [row["validation_accuracy"] for row in rows if row["client"] == found.client]
        assert found.examples == run.partition.sizes()[k]
        assert found.held_out == next(r["validation_examples"] for r in rows if r["client"] == found.client)
        assert (found.first, found.best, found.last) == (course[0], max(course), course[-1])
        assert found.gap == pytest.approx(found.last - mean)
        counts = run.partition.census.dense(np.array([k]))[0]
        held = [counts[run.partition.census.classes.index(name)] for name in found.classes]
        assert held == sorted(counts[counts > 0], reverse=True)
    by_loss = ClientHistories.of(run).results("loss")
    assert [row.last for row in by_loss] == sorted((row.last for row in by_loss), reverse=True)
    assert all(row.best <= min(row.first, row.last) for row in by_loss)


def test_a_client_is_compared_with_the_same_held_out_examples_elsewhere(runs: Mapping[str, Result]) -> None:
    read = {name: read_run(result.directory) for name, result in runs.items()}
    everyone = list(read.values())
    values = {
        name: {row["client"]: row["validation_accuracy"] for row in rows_of(result) if row["round"] == 3}
        for name, result in runs.items()
    }
    for found in with_references(read["fedavg"], everyone):
        mine = values["fedavg"][found.client]
        assert found.to_centralized == pytest.approx(mine - values["centralized"][found.client])
        assert found.to_local_only == pytest.approx(mine - values["local-only"][found.client])
    assert {row.to_local_only for row in with_references(read["fedavg"], everyone[:2])} == {None}


def test_runs_with_other_clients_or_models_are_no_reference(
    tmp_path: Path, runs: Mapping[str, Result]
) -> None:
    mine = read_run(runs["fedavg"].directory)
    others = {
        "examples": experiment(algorithm="centralized", select=None, rounds=1, seed=1),
        "share": experiment(algorithm="centralized", select=None, rounds=1, data={"validation": 0.3}),
        "model": experiment(algorithm="centralized", select=None, rounds=1, model={"name": "mlp"}),
    }
    for name, made in others.items():
        other = read_run(made.run(tmp_path / name, report=False).directory)
        assert same_clients(mine, other) == (name == "model")
        assert references(mine, [other], "centralized") == []
    bound = read_run(runs["centralized"].directory)
    assert references(mine, [mine, bound], "centralized") == [bound]
    assert mine.recorded("partition", "held_out_digest") == bound.recorded("partition", "held_out_digest")


def test_python_has_the_table(runs: Mapping[str, Result]) -> None:
    clients = runs["finetune"].clients
    assert [row["client"] for row in clients] == [
        row.client for row in client_results(read_run(runs["finetune"].directory))
    ]
    assert all(row["before"] is not None for row in clients)
    assert runs["finetune"].client_rounds == rows_of(runs["finetune"])
    pytest.importorskip("pandas")
    frame = clients.to_pandas()
    assert list(frame["last"]) == sorted(frame["last"])


def test_summary_page_and_terminal_name_the_same_worst_client(runs: Mapping[str, Result]) -> None:
    for result in runs.values():
        run = read_run(result.directory)
        worst = worst_clients(run)
        assert worst is not None
        assert worst.label == "worst client"
        table = client_results(run)
        assert (worst.client, worst.value) == (table[0].client, table[0].last)
        assert result.summary["clients"]["worst"] == {
            "client": worst.client,
            "value": worst.value,
            "held_out": worst.held_out,
        }
        assert result.summary["clients"]["mean"] == result.metrics[-1]["clients_accuracy_mean"]
        lines = client_lines(result.directory)
        assert [text.split()[0] for text in lines] == ["client", *(row.client for row in table)]
        page = read_page((write_report(result.directory)).read_text(encoding="utf-8"))
        assert f"{worst.text('accuracy')}" in page.words
        assert f"{worst.client} worst" in page.words
        shown = "%{text}</b><br>"
        dots = [
            trace for trace in page.traces() if f"{shown}training examples" in trace.get("hovertemplate", "")
        ]
        dots = [trace for trace in dots if trace["mode"] == "markers"]
        assert sorted(name for trace in dots for name in trace["text"]) == sorted(NAMES)
        curve = next(trace for trace in page.traces() if len(trace.get("text", ())) == len(table))
        assert curve["text"] == [row.client for row in sorted(table, key=lambda row: row.last or 0.0)]
        assert curve["y"] == sorted(row.last for row in table if row.last is not None)
        assert dots[1]["text"] == [worst.client]


def recorded(root: Path, clients: int, evil: str = "") -> Path:
    """A run of many clients, of which client k has the accuracy k / clients."""
    ids = (f"{evil or 'client'} 0", *(f"client {k}" for k in range(1, clients)))
    spread = {"clients_accuracy_mean": 0.5, "clients_accuracy_worst_decile": 0.05}
    run = make_run(root, metrics=[line(0), line(1, **spread)], summary={})
    make_partition(class_counts(clients, even=False), ids=ids).save(run / "partition.npz")
    rows = [
        {"round": 1, "client": name, "validation_examples": 9, "validation_accuracy": k / clients}
        for k, name in enumerate(ids)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "clients.jsonl").write_text(text + '{"round": 2, "cli')
    return run


def test_from_twenty_clients_on_the_worst_tenth_is_a_mean(tmp_path: Path) -> None:
    for clients, worst in ((19, WorstClients(0.0, "client 0", 9)), (20, WorstClients(0.05))):
        run = recorded(tmp_path / str(clients), clients)
        assert worst_clients(read_run(run)) == worst
        words = read_page(write_report(run).read_text(encoding="utf-8")).words
        assert f"mean {worst.label} accuracy 50.0 % {worst.text('accuracy')}" in words
    assert [WorstClients(0.5).label, WorstClients(0.5, "a").text("loss")] == [
        "worst tenth of the clients",
        "0.5 (a)",
    ]


@pytest.mark.parametrize("forged", [{"measured": None}, {"measured": "8"}, {"worst": "a"}, {"worst": {}}])
def test_a_forged_summary_names_no_worst_client(tmp_path: Path, forged: dict[str, Any]) -> None:
    clients = {"metric": "accuracy", "measured": 8, "worst": {"client": "a", "value": 0.2}, **forged}
    run = recorded(tmp_path, 30)
    (run / "summary.json").write_text(json.dumps({"status": "finished", "clients": clients}))
    assert worst_clients(read_run(run)) == WorstClients(0.05)
    for of in (clients, list(clients), "a"):
        assert ", 5.0 % at the worst tenth of the clients" in worst_text({"clients": of}, "accuracy", 0.05)


def test_of_many_clients_the_terminal_has_the_worst_and_the_page_all(tmp_path: Path) -> None:
    run = recorded(tmp_path, 60, evil="</script><b>&")
    lines = client_lines(run)
    assert len(lines) == 1 + 5 + 1
    assert lines[-1] == "These are the 5 worst of 60 clients; the result page lists all of them."
    html = write_report(run).read_text(encoding="utf-8")
    assert_self_contained(html)
    page = read_page(html)
    assert "</script><b>& 0 worst" in page.words
    assert all(f"client {k} " in page.words for k in range(1, 60))
    assert ("class", "scroll tall") in page.attributes


def test_a_run_that_measured_no_client_says_how_to(tmp_path: Path) -> None:
    run = make_run(tmp_path, metrics=[line(0), line(1)])
    assert client_results(read_run(run)) == []
    assert worst_clients(read_run(run)) is None
    assert client_lines(run) == []
    words = read_page(write_report(run).read_text(encoding="utf-8")).words
    command = measuring_command(read_run(run))
    assert command in words
    assert command.endswith(
        "config.toml --set data.validation=0.2 --set data.validation_from=client --set evaluation.clients=all"
    )


def test_the_command_that_is_suggested_measures_the_clients(tmp_path: Path) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 3}, "validation": 0.1}
    made = Experiment(rounds=1, model="linear", local={"lr": 0.1}, data=data).run(
        tmp_path / "run", report=False
    )
    words = measuring_command(read_run(made.directory)).split()
    assert words[3:] == ["--set", "data.validation_from=client", "--set", "evaluation.clients=all"]
    again = Experiment.load(words[2], words[4::2]).run(tmp_path / "again", report=False)
    assert len(again.clients) == 3


def test_a_damaged_row_is_an_error_with_its_line(tmp_path: Path) -> None:
    run = recorded(tmp_path, 3)
    with (run / "clients.jsonl").open("a") as file:
        file.write('\n{"round": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"line 4"):
        client_results(read_run(run))


def test_a_value_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path, 3)
    row = {"round": 1, "validation_examples": 9, "validation_accuracy": 0.5}
    rows = [row | {"client": f"client {k}", "validation_loss": loss} for k, loss in enumerate((None, 2.0))]
    (run / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_loss = ClientHistories.of(read_run(run)).results("loss")
    assert [(row.client, row.last) for row in by_loss] == [
        ("client 1", 2.0),
        ("client 0", None),
        ("client 2", None),
    ]
    assert math.isclose(ClientHistories.of(read_run(run)).mean("loss") or 0.0, 2.0)
