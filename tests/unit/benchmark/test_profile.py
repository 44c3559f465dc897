"""The command, and what it says."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.benchmark import profile as module
from fedlens.benchmark import profile_client
from fedlens.benchmark.profile import peak_of
from fedlens.benchmark.profile_client import measure_memory
from fedlens.benchmark.profile_engine import PARTS
from fedlens.benchmark.profile_rounds import measure
from fedlens.cli.main import app
from fedlens.engines.executor import Executor
from tests.unit.benchmark.profile_kit import SMALL, built
from tests.unit.cli.conftest import command
from tests.unit.engines.engine_kit import children, gone_within

runner = CliRunner()
DIGITS = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """""Memory is not measured: it has tests of its own.""" ""
    monkeypatch.chdir(tmp_path)
    memory = {"training": 2_000_000, "gpu": None, "examples": 72, "batch": 10}
    monkeypatch.setattr(module, "measure_memory", lambda *given: memory)


def profiled(*words: str) -> Any:
    return runner.invoke(app, ["bench", "profile", *words])


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    answer = profiled("digits", *DIGITS, "--rounds", "2", "--peak", "0.5", "--layers", "--json", "found.json")
    assert answer.exit_code == 0, answer.output
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads(Path("found.json").read_text())
    round = found["round"]
    assert sum(round["parts"].values()) == pytest.approx(round["seconds"], rel=1e-9)
    assert round["pairs"] == len(round["training_seconds"]["plain"]) == 2
    lines = [line.split() for line in answer.stdout.splitlines()]
    labels = [part.rpartition(".")[2] for part in PARTS]
    shown = {line[0]: float(line[1]) for line in lines if line and line[0] in labels}
    assert list(shown) == labels
    total = next(float(line[2]) for line in lines if line[:2] == ["a", "round"])
    assert total == pytest.approx(1e3 * round["seconds"], abs=0.006)
    assert sum(shown.values()) == pytest.approx(total, abs=0.06)
    assert found["model"]["trainable"] == 9930
    assert 4 * 9930 < found["bytes"]["up_a_client"] < 4 * 9930 + 100
    for way in ("down", "up"):
        assert found["bytes"][f"{way}_a_run"] == 3 * found["bytes"][f"{way}_a_round"] > 0
    speed = found["speed"]
    assert speed["peak"] == {"flops": 5e11, "source": "given"}
    assert speed["share_of_peak"] == pytest.approx(speed["round"] / 5e11)
    assert speed["round"] == pytest.approx(speed["images"] * found["model"]["step_an_image"])
    plain = round["training_seconds"]["plain"]
    passes = sum(v for name, v in round["parts"].items() if name.startswith(("forward", "backward")))
    assert speed["passes"] * passes == pytest.approx(speed["round"] * sum(plain) / len(plain))
    assert {"fedlens", "torch", "cpu", "command"} <= found["environment"].keys()
    assert sum("Conv2d" in line for line in lines) == 2
    assert "2.0 MB of tensors while it trains (72 examples, batches of 10)" in answer.stdout
    alone, together = (found["launches"][key] for key in ("alone", "together"))
    assert 20 < alone < together
    least = f"{alone:g}: at least {alone * 0.005:.2g} ms on a GPU at 5 us each (a model, not measured)"
    assert next(line[4:] for line in lines if line[:3] == ["launches", "of", "a"]) == least.split()
    assert any(line[:6] == ["of", "two", "clients", "at", "once", f"{together:g}:"] for line in lines)


@pytest.mark.usefixtures("quick_workers")
def test_what_workers_do_stands_beside_the_driver() -> None:
    answer = profiled(
        "digits", *DIGITS, "--engine", "processes", "--set", "engine.workers=2", "--rounds", "1",
        "--peak", "1", "--json", "-",
    )  # fmt: skip
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    workers = found["round"]["workers"]
    assert 1 <= workers["processes"] <= 2
    assert workers["parts"]["forward"] > 0
    assert "forward" not in found["round"]["parts"]
    assert "driver, ms" in answer.stderr


def test_a_model_by_itself() -> None:
    answer = profiled("--model", "mcmahan-cnn", "--shape", "1,28,28", "--layers", "--json", "model.json")
    assert answer.exit_code == 0, answer.output
    assert "1,663,370 trainable" in answer.stdout
    assert "MACs" in answer.stdout
    found = json.loads(Path("model.json").read_text())
    assert found["model"]["macs"] == 12_273_152
    wide = profiled("--model", "mlp", "--set", "model.hidden=7", "--shape", "1,2,2", "--classes", "3")
    assert f"{4 * 7 + 7 + 7 * 7 + 7 + 7 * 3 + 3} trainable" in wide.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digit"], "did you mean 'digits'"),
        (["cifar10/fedavg-dirichlet", "--data-dir", "empty"], "cifar"),
        (["digits", "--set", "local.lr=-1"], "--set local.lr"),
        (
            [
                "digits",
                "--set",
                "model.name=small-cnn",
                "--set",
                "model.norm=batch",
                "--engine",
                "vectorized",
            ],
            "vectorized",
        ),
        ([], "neither a recipe nor a model is named"),
        (["digits", "--model", "linear"], "brings its own model"),
        (["digits", "--shape", "1,2,2"], "--shape"),
        (["digits", "--classes", "3"], "--classes"),
        (["digits", "--peak", "0"], "--peak"),
        (["--model", "lineer"], "did you mean 'linear'"),
        (["--model", "linear", "--shape", "3x4"], "3,32,32"),
        (["--model", "linear", "--set", "local.lr=1"], "only settings of the model"),
        (["--model", "hsu-cnn", "--shape", "3,2,2"], "at least 4x4"),
        (["--model", "linear", "--json", "/dev/null/found.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_profiled_is_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    answer = profiled(*words)
    assert answer.exit_code in (2, 3), answer.output
    assert said in answer.stderr
    assert answer.stderr.startswith("error: ")
    assert "unexpected" not in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle_it_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    argv, env = command(["bench", "profile", "digits", "--engine", "processes", "--set", "engine.workers=2"])
    process = subprocess.Popen(argv, env={**env, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(workers := children(process.pid)) < 3 and time.monotonic() < until:  # and who starts them
        time.sleep(0.05)
    assert any(tmp_path.glob("fedlens-profile-*"))
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert said.strip() == "interrupted: the command had not ended; run it again"
    assert not any(tmp_path.glob("fedlens-profile-*"))
    assert len(workers) == 3
    assert gone_within(20, workers)


def test_absent_data_are_told_as_a_run_tells_it() -> None:
    words = ["cifar10/fedavg-dirichlet", "--data-dir", "empty"]
    assert profiled(*words).stderr == runner.invoke(app, ["run", *words]).stderr


def test_the_memory_of_a_client_is_that_of_its_tensors() -> None:
    """Half a million weights: a step has their gradients too, and the reply has what they moved by."""
    experiment = built("model.name=mlp", "model.hidden=700")
    measured = measure(experiment, 1)
    memory = measure_memory(experiment, measured.ask, measured.client_state)
    weights = 4 * experiment.parameters
    assert weights < memory.pop("training") < 3 * weights
    assert memory == {"gpu": None, "examples": 68, "batch": 10}


@pytest.mark.parametrize("engine", ["inline", "auto"])
def test_the_memory_of_a_client_is_that_in_the_engines_precision(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = built(f"engine.name={engine}", "engine.precision=bf16")
    measured = measure(experiment, 1)
    seen: list[str] = []

    class Seeing(Executor):
        def __post_init__(self) -> None:
            super().__post_init__()
            seen.append(self.program.arithmetic.precision)

    monkeypatch.setattr(profile_client, "Executor", Seeing)
    measure_memory(experiment, measured.ask, measured.client_state)
    assert seen == ["bf16"]


def test_a_client_that_fails_has_no_memory_to_measure() -> None:
    experiment = built()
    measured = measure(experiment, 1)
    broken = replace(measured.ask, shared={"model": {}, "lr": "high"})
    assert "the client failed" in measure_memory(experiment, broken, {})["not_measured"]


def test_the_peak_of_a_cpu_is_measured_and_leaves_the_threads_alone() -> None:
    import torch

    threads = torch.get_num_threads()
    peak = peak_of("cpu", "fp32", 2)
    assert peak.flops > 1e8
    assert "2 cores" in peak.source
    assert torch.get_num_threads() == threads
