"""Clients whose code does its worst: each is that client's failure in one sentence, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fedlens import Experiment, load_result
from fedlens.base.errors import HookError, one_line, told
from fedlens.core.schema import METRICS, Bound, Schema
from fedlens.run.progress import ProgressBase
from tests.faults import faulty
from tests.faults.run_kit import sha
from tests.faults.test_refused_replies import ENGINES, FILE, experiment
from tests.unit.engines.ray_kit import NEEDS_RAY

RULES = ["exit", "generator", "stop", "interrupt", "bare", "mute", "long", "control", "recursion"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hostile") / "ref"
    experiment([0, 1, 2]).run(out)
    return out


def check(out: Path, reference: Path, engine: Any) -> None:
    bad = [3 + k for k in range(len(faulty.HOSTILE))]
    algorithm = {"name": f"{FILE}:algorithm", "first": 3, "faults": list(faulty.HOSTILE)}
    run = experiment([0, 1, 2, *bad], algorithm=algorithm, **({"engine": engine} if engine else {})).run(out)
    assert sha(out / "model.safetensors") == sha(reference / "model.safetensors")
    assert set(run.summary["failures"]) == set(map(str, bad))
    for client, (_, said) in zip(bad, faulty.HOSTILE.values(), strict=True):
        ((reason, times),) = run.summary["failures"][str(client)].items()
        assert reason.startswith(said)
        assert times == 3
        assert reason.isprintable()
        assert len(reason) < 300


@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_a_client_raises_or_sends_is_its_own_failure(
    tmp_path: Path, reference: Path, engine: str
) -> None:
    check(tmp_path / "run", reference, ENGINES[engine])


@NEEDS_RAY
@pytest.mark.nightly
def test_whatever_a_client_raises_or_sends_is_its_own_failure_on_ray(tmp_path: Path, reference: Path) -> None:
    check(tmp_path / "run", reference, {"name": "ray", "workers": 2})


@pytest.mark.parametrize(
    "engine",
    [
        "inline",
        pytest.param("vectorized", marks=pytest.mark.nightly),
        pytest.param("processes", marks=pytest.mark.nightly),
        pytest.param("default", marks=pytest.mark.nightly),
        pytest.param("groups", marks=pytest.mark.nightly),
        pytest.param("ray", marks=[pytest.mark.nightly, NEEDS_RAY]),
    ],
)
def test_no_client_can_send_what_the_server_measures(tmp_path: Path, reference: Path, engine: str) -> None:
    bad = [3 + k for k in range(len(faulty.METRICS))]
    workers = {"name": "ray" if engine == "ray" else "processes", "workers": 2}
    made = {"processes": workers, "ray": workers, "groups": {**workers, "group": 4}}.get(engine, engine)
    algorithm = {"name": f"{FILE}:boasting", "first": 3}
    run = experiment([0, 1, 2, *bad], algorithm=algorithm, engine=made).run(tmp_path / "run")
    right = load_result(reference)
    assert run.summary["best"]["value"] == pytest.approx(right.summary["best"]["value"], abs=1e-3)
    for line, before in zip(run.metrics, right.metrics, strict=True):
        assert line.keys() == before.keys()
        assert line["test_accuracy"] == pytest.approx(before["test_accuracy"], abs=1e-3)
        assert line["failed"] == (len(bad) if line["round"] else 0)
    assert set(run.summary["failures"]) == set(map(str, bad))
    for client, (_, said) in zip(bad, faulty.METRICS.values(), strict=True):
        ((reason, times),) = run.summary["failures"][str(client)].items()
        assert (reason.startswith(said), reason.isprintable(), times) == (True, True, 3), reason


def test_what_a_line_says_of_the_run_itself_cannot_be_declared(reference: Path) -> None:
    rows = [json.loads(line) for line in (reference / "clients.jsonl").read_text().splitlines()]
    names = {name for row in [*load_result(reference).metrics, *rows] for name in row} - METRICS.keys()
    assert {"round", "client", "test_accuracy", "bytes_up"} < names
    for name in names:
        with pytest.raises(HookError):
            Schema(metrics={name: Bound()})


@pytest.mark.parametrize("fault", RULES)
def test_a_hook_that_raises_among_stacked_clients_is_its_clients_failure(tmp_path: Path, fault: str) -> None:
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 20}},
        "model": "linear",
        "client": {"name": f"{FILE}:hostile_rule", "fault": fault},
        "local": {"lr": 0.1, "batch_size": "all"},
        "engine": "vectorized",
    }
    run = Experiment(**settings).run(tmp_path / "run")
    assert run.metrics[-1]["failed"] == 3
    for reasons in run.summary["failures"].values():
        ((reason, _),) = reasons.items()
        assert reason.startswith(faulty.HOSTILE[fault][1])


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kills", "its worker process ended with exit code 9, 3 times"),
        ("crashes", "its worker process was killed by SIGSEGV, 3 times"),
    ],
)
def test_a_worker_that_ends_is_reported_with_its_exit_code_or_signal(
    tmp_path: Path, fault: str, said: str
) -> None:
    algorithm = {"name": f"{FILE}:algorithm", "first": 3, "faults": [fault]}
    engine = {"name": "processes", "workers": 1}
    run = experiment([0, 1, 3], rounds=1, algorithm=algorithm, engine=engine).run(tmp_path / "run")
    assert run.summary["failures"] == {"3": {said: 1}}


class PressesCtrlC(ProgressBase):
    """Ctrl-C at the end of round 1, as a signal that arrives in the middle of round 2."""

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == 1:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_ctrl_c_still_ends_a_run_in_this_process(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    algorithm = {"name": f"{FILE}:algorithm", "first": 3, "faults": ["interrupt"]}
    long = experiment([0, 1, 2, 3], rounds=100_000, algorithm=algorithm)
    with pytest.raises(KeyboardInterrupt):
        long.run(tmp_path / "run", progress=PressesCtrlC())
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_exception_is_told_in_one_short_printable_line() -> None:
    for make, _ in faulty.HOSTILE.values():
        try:
            make({"update": {faulty.NAME: None}})
        except BaseException as error:
            said = told(error)
            assert said.isprintable()
            assert len(said) < 300
    assert told(type("A\x1b" * 300, (Exception,), {})("x")).isprintable()
    assert one_line("\ud800 \u202e") == "\\ud800 \\u202e"
