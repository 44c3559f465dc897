"""Every command that computes takes the GPU by itself, and gives the results of the processor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedlens.benchmark.federation import Federation
from fedlens.benchmark.limit import BareLimit, BatchedLinear, Workload, linear
from fedlens.cli.main import app
from fedlens.engines import devices
from fedlens.engines.hardware import Hardware, hardware
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from fedlens.use import device_here
from tests.gpu.conftest import SIMULATED

RECIPE = """
name = "tiny"
rounds = 1
model = "linear"
local = { lr = 0.1, steps = 1, batch_size = 4 }
select = { name = "uniform", clients_per_round = 2 }
engine = { name = "inline" }
[data]
dataset = { name = "synthetic", shape = [1, 8, 8], classes = 4, train = 24, test = 8 }
partition = { name = "iid", clients = 3 }
"""
ON_CPU = ["--set", "engine.device=cpu"]
CHOSEN = "for the processor"


def invoke(*words: str | Path) -> str:
    """What the command prints."""
    answer = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


@pytest.fixture(scope="module", autouse=True)
def one_gpu() -> Iterator[None]:
    """There is one GPU, however many there are: of several, the free memory is read in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        hardware.cache_clear()
        yield
    hardware.cache_clear()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    file.write_text(RECIPE)
    return file


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the GPU that has recorded its local models."""
    folder = tmp_path_factory.mktemp("runs") / "gpu"
    recorded = "record.local_models={rounds=[1]}"
    said = invoke("run", recipe, "--set", recorded, "--out", folder, "--no-report")
    assert CHOSEN in said
    assert RunDir(folder).read_config()["engine"]["device"].startswith("cuda")
    return folder


def launches() -> int:
    """The kernels that the simulated GPU has started."""
    if not SIMULATED:
        return 0
    import simgpu

    return int(simgpu.COUNT["kernels"])


def near(one: Any, other: Any) -> bool:
    """Whether results are equal; those of a real GPU, whether they are near."""
    if SIMULATED:
        return bool(one == other)
    if isinstance(one, dict):
        return all(near(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(near, one, other))
    return bool(one == pytest.approx(other, rel=1e-3, abs=1e-3)) if isinstance(one, float) else one == other


def test_predict(run: Path, tmp_path: Path) -> None:
    for k in range(2):
        pixels = np.random.default_rng(k).integers(0, 255, (8, 8), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
    tables = []
    for device in ([], ["--device", "cpu"]):
        out = tmp_path / f"out{len(device)}"
        said = invoke("predict", run, tmp_path / "0.png", tmp_path / "1.png", "--out", out, *device)
        assert (CHOSEN in said) == (not device)
        tables.append((out / "predictions.csv").read_text().splitlines())
    assert len(tables[0]) == 3
    assert tables[0] == tables[1] or not SIMULATED


def test_analyze(run: Path, tmp_path: Path) -> None:
    made = []
    for device in ([], ["--device", "cpu"]):
        out, before = tmp_path / f"out{len(device)}", launches()
        invoke("analyze", run, "dynamics", "--out", out, *device)
        assert (launches() > before) == (not device) or not SIMULATED
        made.append([json.loads(line) for line in (out / "dynamics.jsonl").read_text().splitlines()])
    assert made[0]
    assert near(made[0], made[1])


def test_a_run_of_a_gpu_is_analyzed_where_none_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (devices, device_here):
        monkeypatch.setattr(module, "hardware", Hardware)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = invoke("analyze", run, "dynamics", "--out", tmp_path)
    assert "the run trained on a GPU, and this machine has none" in said
    assert (tmp_path / "dynamics.jsonl").stat().st_size


def test_pretrain(recipe: Path, tmp_path: Path) -> None:
    trees = []
    for name, device in (("gpu", []), ("cpu", ON_CPU)):
        out = tmp_path / f"{name}.safetensors"
        said = invoke("pretrain", recipe, "--out", out, *device, "--no-report")
        assert (CHOSEN in said) == (not device)
        trees.append(checkpoint.read_model(out)[0])
    torch.testing.assert_close(
        *trees, **({"rtol": 0, "atol": 0} if SIMULATED else {"rtol": 1e-3, "atol": 1e-3})
    )


def test_cost(recipe: Path, tmp_path: Path) -> None:
    measured = []
    for name, device in (("gpu", []), ("cpu", ON_CPU)):
        words = [
            "cost",
            recipe,
            *device,
            "--seeds",
            "1",
            "--jobs",
            "0",
            "--no-report",
            "--out",
            tmp_path / name,
        ]
        said = invoke(*words)
        assert ("GPU" in said) == (not device), said
        runs = [RunDir(folder).read_metrics()[-1] for folder in sorted((tmp_path / name).glob("*-seed0"))]
        measured.append([{key: line[key] for key in line if key.endswith("loss")} for line in runs])
    assert len(measured[0]) == 4
    assert near(*measured)


def lines(folder: Path) -> list[dict[str, Any]]:
    made = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [{"device": line["device"], "loss": line["curve"]["test_loss"]} for line in made]


def test_sweep(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f'base = "{recipe}"\nseeds = [0]\n[methods.fedavg]\n')
    made = []
    for name, device in (("gpu", []), ("cpu", ON_CPU)):
        said = invoke("sweep", file, "--out", tmp_path / name, "--jobs", "0", *device, "--no-report")
        assert (CHOSEN in said) == (not device)
        made.append(lines(tmp_path / name))
    there, here = made
    assert [line["device"] for line in (*there, *here)] == ["cuda", "cpu"]
    assert near([line["loss"] for line in there], [line["loss"] for line in here])


def test_bench_profile(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    invoke("bench", "profile", recipe, "--rounds", "2", "--peak", "1", "--json", file)
    assert json.loads(file.read_text())["experiment"]["device"].startswith("cuda")


@pytest.mark.nightly
def test_bench_speed() -> None:
    """Bare PyTorch and fedlens train the same on the GPU as on the processor."""
    tiny = Workload("tiny", linear, clients=4, examples=20, shape=(1, 28, 28), cohort=2, batch=10)
    weights = []
    for device in ("cpu", "cuda"):
        load = replace(tiny, device=device)
        limit, by_hand = BareLimit(load), BatchedLinear(load)
        federation = Federation(load, {"name": "inline"})
        assert min(one.round() for one in (limit, by_hand, federation)) > 0
        federation.close()
        assert federation.about["engine"]["device"] == device
        weights.append([*limit.weights, *by_hand.weights])
    assert {weight.device.type for weight in weights[1]} == {"cuda"}
    for here, there in zip(*weights, strict=True):
        torch.testing.assert_close(there.cpu(), here)
