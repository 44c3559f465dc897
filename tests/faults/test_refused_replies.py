"""Replies that are wrong: refused, counted by client and reason, and the result is that of a run without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens import Experiment, resume
from fedlens.base.errors import RunFailed
from fedlens.cli.main import app
from fedlens.run import checkpoint
from tests.faults import faulty
from tests.faults.run_kit import outcome, sha

ROUNDS = 3
FILE = str(Path(faulty.__file__))
pytestmark = pytest.mark.usefixtures("quick_workers")
ENGINES: dict[str, Any] = {"inline": "inline", "processes": {"name": "processes", "workers": 2}}


def experiment(clients: list[int], engine: Any = "inline", beta: float = 0.0, **more: Any) -> Experiment:
    """The linear model on 20 unequal clients; `clients` take part, and those from 3 on answer wrongly."""
    algorithm = {"name": f"{FILE}:algorithm", "beta": beta, "first": 3, "faults": list(faulty.FAULTS)}
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "seed": 1,
        "data": {"dataset": "digits", "partition": {"name": "shards", "clients": 20, "scheme": "mcmahan"}},
        "model": "linear",
        "select": {"name": "fixed", "clients": clients},
        "algorithm": algorithm,
        "local": {"lr": 0.1, "batch_size": 10},
        "engine": ENGINES.get(engine, engine) if isinstance(engine, str) else engine,
        "record": {"clients": True},
    }
    return Experiment(**{**settings, **more})


def reasons(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    lines = Path(FILE).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "the camera is broken" in text)
    found = {}
    for client, (_, reason) in enumerate(faulty.FAULTS.values(), 3):
        told = reason.format(most=max(sizes.values()), weight=sizes[str(client)], line=line)
        found[str(client)] = {told: ROUNDS}
    return found


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_of_bad_reply_is_refused_and_counted(tmp_path: Path, engine: str, beta: float) -> None:
    bad = [3 + k for k in range(len(faulty.FAULTS))]
    ref = experiment([0, 1, 2], "inline", beta).run(tmp_path / "ref")
    run = experiment([0, 1, 2, *bad], engine, beta).run(tmp_path / "run")
    left, right = outcome(tmp_path / "ref"), outcome(tmp_path / "run")
    assert left["model"] == right["model"]
    assert left["best"] == right["best"]
    for before, after in zip(left["metrics"], right["metrics"], strict=True):
        took_part = after["round"] > 0
        differing = {"failed": len(bad) * took_part, "bytes_down": after["bytes_down"]}
        assert after == before | differing
    sizes = {str(k): int(n) for k, n in enumerate(_sizes(tmp_path / "run"))}
    assert run.summary["status"] == "finished"
    assert run.summary["failures"] == reasons(sizes)
    assert ref.summary["failures"] == {}
    rows = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").read_text().splitlines()]
    assert sum(row.get("times", 0) for row in rows) == ROUNDS * len(bad)
    last = checkpoint.load_latest(tmp_path / "run/checkpoint")
    assert last is not None
    assert last.payload["clients"] == {}  # no state of a refused reply was kept


def _sizes(run: Path) -> list[int]:
    from fedlens.data.partition.partition import Partition

    return list(Partition.load(run / "partition.npz").sizes())


def test_a_client_whose_work_kills_its_process_is_one_more_that_fails(tmp_path: Path) -> None:
    ref = experiment([0, 1, 2]).run(tmp_path / "ref")
    algorithm = {"name": f"{FILE}:algorithm", "first": 3, "faults": ["kills"]}
    run = experiment([0, 1, 2, 3], "processes", algorithm=algorithm).run(tmp_path / "run")
    assert sha(tmp_path / "ref/model.safetensors") == sha(tmp_path / "run/model.safetensors")
    assert run.summary["failures"] == {"3": {"its worker process ended with exit code 9, 3 times": ROUNDS}}
    assert run.metrics[-1]["test_loss"] == ref.metrics[-1]["test_loss"]


def test_a_reply_that_comes_twice_counts_once(tmp_path: Path) -> None:
    ref = experiment([0, 1, 2]).run(tmp_path / "ref")
    run = experiment([0, 1, 2], f"{FILE}:twice").run(tmp_path / "run")
    assert sha(tmp_path / "ref/model.safetensors") == sha(tmp_path / "run/model.safetensors")
    told = "answered a request twice, or one that was not asked"
    assert run.summary["failures"] == {str(k): {told: ROUNDS} for k in range(3)}
    assert [line["clients"] for line in run.metrics[1:]] == [3] * ROUNDS
    assert [line["bytes_up"] for line in run.metrics] == [line["bytes_up"] for line in ref.metrics]


@pytest.mark.report_page
def test_where_no_reply_is_good_the_run_fails_and_keeps_what_it_has(tmp_path: Path, monkeypatch: Any) -> None:
    """... and goes on, when the cause is gone, to what it would have been."""
    monkeypatch.chdir(tmp_path)
    algorithm = {"name": f"{FILE}:algorithm", "first": 3, "faults": ["shape", "shape", "zero"]}
    whole = experiment([3, 4, 5], algorithm=algorithm, checkpoint={"seconds": 0})
    (tmp_path / "cured").touch()
    whole.run(tmp_path / "ref")
    (tmp_path / "cured").unlink()
    with pytest.raises(RunFailed) as caught:
        whole.run(tmp_path / "run")
    said = (
        "no client update of round 1 was accepted: update.1.weight has shape (64, 10) where (10, 64) is expected "
        "(2 of 3); "
        "the same error at every client usually comes from the model, the data or the algorithm."
    )
    assert str(caught.value) == said
    assert caught.value.exit_code == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["error"], summary["rounds_done"]) == ("failed", said, 0)
    shape = "update.1.weight has shape (64, 10) where (10, 64) is expected"
    assert (summary["failures"]["3"], summary["failures"]["4"]) == ({shape: 1}, {shape: 1})
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "config.toml",
        "environment.json",
        "partition.npz",
        "metrics.jsonl",
        "checkpoint",
        "report.html",
    } <= kept

    with pytest.raises(RunFailed, match="no client update of round 1 was accepted"):
        resume(tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["failures"] == summary["failures"]

    (tmp_path / "cured").touch()
    assert resume(tmp_path / "run").summary["status"] == "finished"
    assert outcome(tmp_path / "run") == outcome(tmp_path / "ref")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "centralized"])
def test_a_learning_rate_that_is_far_too_high_fails_and_is_named(
    tmp_path: Path, monkeypatch: Any, algorithm: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(
        f"""
        rounds = 40
        model = "mlp"
        algorithm = "{algorithm}"
        data.dataset = "digits"
        data.partition = {{ name = "iid", clients = 4 }}
        local.lr = 1e6
        """
    )
    for arguments in (["run", "own.toml", "--out", "run"], ["resume", "run"]):
        answer = CliRunner().invoke(app, [*arguments, "--json"])
        assert answer.exit_code == 1
        (error,) = [line for line in answer.stderr.splitlines() if line.startswith("error: ")]
        assert error.endswith(
            "usually the learning rate is too high: local.lr is 1e+06, try 0.1, or set local.clip_norm."
        )
        assert "Traceback" not in answer.stderr
        told = json.loads(answer.stdout)
        assert told["status"] == "failed"
        assert error == f"error: {told['error']['what']}; {told['error']['hint']}."
        assert told["exit_code"] == 1
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == told["rounds_done"] + 1
