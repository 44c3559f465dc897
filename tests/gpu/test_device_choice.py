"""The GPUs of the machine are used where nobody names a device, and a resumed run repeats the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.api import resume
from fedlens.base.errors import ConfigError
from fedlens.engines import default, devices, hardware
from fedlens.run import build
from fedlens.run.progress import ProgressBase
from tests.contract.contract_kit import Stopping, experiment, outcome, weights


class Notes(ProgressBase):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, sentence: str) -> None:
        self.said.append(sentence)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the free bytes of the GPUs, also of the process that reads them."""

    def set_free(*free: int) -> None:
        monkeypatch.setattr(devices, "free_memory_of", lambda device: list(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[-1], 2 * free[-1]))

    return set_free


@pytest.fixture
def one(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU, which is an H100."""
    found = hardware.Hardware(("NVIDIA H100",))
    for module in (devices, build):
        monkeypatch.setattr(module, "hardware", lambda: found)


def test_clients_train_together_and_a_resumed_run_has_the_same_groups(
    one: None, free: Any, tmp_path: Path
) -> None:
    """On the GPU that is there, also if its free memory has changed meanwhile."""
    free(2**33)
    made = experiment(model="linear", rounds=2, engine="default", checkpoint={"seconds": 0})
    notes = Notes()
    whole = made.run(tmp_path / "whole", progress=notes, report=False)
    (line,) = (sentence for sentence in notes.said if "GPU" in sentence)
    assert line.startswith("1 GPU, NVIDIA H100: vectorized, groups of ")
    assert line.endswith(" clients; --set engine.device=cpu for the processor")
    table = whole.config["engine"]
    assert (table["name"], table["device"]) == ("vectorized", "cuda")
    assert table["group"] > 1
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "stopped", progress=Stopping(1), report=False)
    free(2**24)
    resumed = resume(tmp_path / "stopped", report=False)
    assert resumed.config["engine"] == table
    assert outcome(resumed) == outcome(whole)


def test_a_run_without_a_named_device_has_the_numbers_of_the_gpu(one: None, tmp_path: Path) -> None:
    inline = {"name": "inline"}
    runs = [
        experiment(model="linear", rounds=1, engine=engine).run(tmp_path / str(k), report=False)
        for k, engine in enumerate((inline, inline | {"device": "cuda"}))
    ]
    assert runs[0].config["engine"] == runs[1].config["engine"]
    assert weights(runs[0]) == weights(runs[1])


def test_a_resumed_run_stays_on_its_kind_of_device(
    one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(model="linear", rounds=2, engine={"name": "inline"})
    made.run(tmp_path, until=1, report=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (devices, build):
        monkeypatch.setattr(module, "hardware", lambda: hardware.Hardware())
    with pytest.raises(ConfigError, match=r"the device is 'cuda', but torch .* finds no GPU"):
        resume(tmp_path, report=False)


@pytest.mark.usefixtures("two_gpus")
def test_one_process_takes_the_gpu_with_the_most_free_memory(free: Any, tmp_path: Path) -> None:
    free(2**30, 2**33)
    for name in ("inline", "default"):
        run = experiment(model="linear", rounds=1, engine={"name": name}).run(tmp_path / name, report=False)
        assert run.config["engine"]["device"] == "cuda:1"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.nightly
def test_a_long_run_trains_on_all_gpus(free: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(2**33, 2**33)
    monkeypatch.setattr(default, "_LONG", 0.0)
    monkeypatch.setattr(default, "default_workers", lambda *_: 2)
    notes = Notes()
    run = experiment(model="linear", rounds=1, engine="default").run(
        tmp_path / "two", progress=notes, report=False
    )
    table = run.config["engine"]
    assert (table["name"], table["device"], table["workers"]) == ("processes", "cuda", 2)
    assert any("processes, 2 workers, groups of " in sentence for sentence in notes.said)
    one = {"name": "vectorized", "device": "cuda:0", "group": table["group"]}
    alone = experiment(model="linear", rounds=1, engine=one).run(tmp_path / "one", report=False)
    assert weights(run) == weights(alone)
