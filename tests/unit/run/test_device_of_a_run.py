"""The device of a run: what config.toml and environment.json record, what is said, and what a resumed run compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlens.api import Experiment, resume
from fedlens.base.errors import RunDirectoryError
from fedlens.engines import devices
from fedlens.engines.hardware import Hardware
from fedlens.run import build
from fedlens.run.changes import changed, defining
from fedlens.run.environment import changed_bits
from fedlens.run.progress import ProgressBase
from fedlens.run.rundir import RunDir
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source

SETTINGS = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}


class Notes(ProgressBase):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, sentence: str) -> None:
        self.said.append(sentence)


def ran(out: Path, found: Hardware, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run says that pauses after a round on a machine with this hardware."""
    monkeypatch.setattr(devices, "hardware", lambda: found)
    monkeypatch.setattr(build, "hardware", lambda: found)
    notes = Notes()
    Experiment(**SETTINGS).run(out, progress=notes, until=1, report=False)
    return notes.said


def test_a_run_without_a_gpu_records_the_processor_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(tmp_path / "run", Hardware(), monkeypatch) == []
    run = RunDir.open(tmp_path / "run")
    assert run.read_config()["engine"]["device"] == "cpu"
    environment = run.read_environment()
    assert environment is not None
    assert (environment["device"], environment["driver"]) == ("cpu", None)


def test_a_gpu_that_is_not_used_gets_a_sentence_and_a_resumed_run_keeps_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ran(tmp_path / "run", Hardware(torch="2.9.0+cpu", nvidia=True), monkeypatch)
    assert said == [
        "the NVIDIA GPU is not used: torch 2.9.0+cpu is built for the processor; install a CUDA build, see "
        "pytorch.org; the run trains on the processor"
    ]
    found = Hardware(("NVIDIA H100",))  # installed meanwhile
    monkeypatch.setattr(devices, "hardware", lambda: found)
    monkeypatch.setattr(build, "hardware", lambda: found)
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"torch": "1.0"}))
    notes = Notes()
    resumed = resume(tmp_path / "run", progress=notes, report=False)
    assert resumed.config["engine"]["device"] == "cpu"
    assert notes.said[0].startswith("the last bits of results may differ from now on: torch is ")
    assert notes.said[0].endswith(", was 1.0")
    assert notes.said[1:] == ["resuming after round 1 of 2"]


def test_another_kind_of_device_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(tmp_path / "run", Hardware(), monkeypatch)
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace('device = "cpu"', 'device = "cuda"'))
    with pytest.raises(RunDirectoryError, match=r'engine\.device is "cuda", was "cpu"'):
        resume(tmp_path / "run")


def test_a_new_engine_table_keeps_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(tmp_path / "run", Hardware(), monkeypatch)
    path = tmp_path / "run" / "config.toml"
    text = path.read_text()
    start, end = text.index("[engine]"), text.index("[seeds]")
    path.write_text(f'{text[:start]}[engine]\nname = "inline"\n\n{text[end:]}')
    found = Hardware(("NVIDIA H100",))
    monkeypatch.setattr(devices, "hardware", lambda: found)
    resumed = resume(tmp_path / "run", report=False)
    assert resumed.summary["changes"] == []
    environment = RunDir.open(tmp_path / "run").read_environment()
    assert environment is not None
    assert environment["device"] == "cpu"


def test_another_gpu_of_the_machine_is_no_change() -> None:
    def settings(device: str) -> Source:
        return Source({**SETTINGS, "engine": {"name": "inline", "device": device}})

    before = defining(read_config(settings("cuda:0").values))
    for device, keys in (("cuda:1", []), ("cuda", []), ("cpu", ["engine.device"])):
        source = settings(device)
        assert [change["key"] for change in changed(before, read_config(source.values), source)] == keys


def test_what_changes_the_last_bits_is_named() -> None:
    h100, a100 = {"name": "NVIDIA H100", "memory": 80}, {"name": "NVIDIA A100", "memory": 40}
    before = {"torch": "2.9", "gpus": [h100], "driver": "550.1", "cpu": {"capability": "AVX512"}}
    for now, device, says in (
        ({"gpus": [h100, h100]}, "cuda", None),
        ({"gpus": [a100]}, "cuda", "the GPU is NVIDIA A100, was NVIDIA H100"),
        ({"gpus": [h100, a100]}, "cuda:0", None),
        ({"gpus": [h100, a100]}, "cuda", "the GPU is NVIDIA A100 and NVIDIA H100, was NVIDIA H100"),
        ({"driver": "580.2"}, "cuda", "its driver is 580.2, was 550.1"),
        ({"gpus": [a100], "driver": "580.2"}, "cpu", None),
        ({"cpu": {"capability": "AVX2"}}, "cpu", "the processor's instruction set is AVX2, was AVX512"),
        ({"cpu": {"capability": "AVX2"}}, "cuda", None),
        ({"torch": "2.10", "cpu": {}}, "", "torch is 2.10, was 2.9"),
    ):
        said = changed_bits(before, {**before, **now}, device)
        assert said == (says and f"the last bits of results may differ from now on: {says}")
    assert changed_bits({}, before, "cuda") is None  # of an older version
