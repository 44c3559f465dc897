"""The device of a command that uses a run: what an option asks for, and what stands in for the GPU of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlens.base.errors import ConfigError
from fedlens.engines import devices
from fedlens.engines.hardware import Hardware
from fedlens.use import device_here as module
from fedlens.use.device_here import chosen_for, device_here, engine_here


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many GPUs of a name, by the parameter of the test."""
    here = Hardware(("H100",) * request.param)
    for each in (devices, module):
        monkeypatch.setattr(each, "hardware", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(here.gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here.gpus))


def with_gpus(number: int) -> Any:
    return pytest.mark.parametrize("gpus", [number], indirect=True)


@with_gpus(1)
def test_a_gpu_is_taken_and_the_way_back_is_said(gpus: None) -> None:
    device, (said,) = device_here("auto")
    assert device == "cuda"
    assert said == "1 GPU, H100: computing on cuda; --device cpu for the processor"
    assert device_here("cuda:0") == ("cuda:0", [])
    assert chosen_for([{}], "4 runs") == ["1 GPU, H100: 4 runs; --set engine.device=cpu for the processor"]
    assert chosen_for([{"name": "ray"}, {"device": "cuda"}], "4 runs") == []


@with_gpus(0)
@pytest.mark.parametrize(("name", "what"), [("gpu", "must be 'auto'"), ("cuda", "finds no GPU")])
def test_a_device_that_cannot_be_is_refused_with_the_option(name: str, what: str, gpus: None) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        device_here(name)
    assert caught.value.where == "--device"
    assert "engine.device" not in str(caught.value)


@with_gpus(0)
def test_the_processor_stands_in_for_the_gpu_of_a_run(gpus: None) -> None:
    run = {"name": "inline", "device": "cuda:3", "precision": "tf32"}
    table, said = engine_here(run)
    assert table == {"name": "inline", "device": "cpu", "precision": "fp32"}
    assert said == [
        "the run trained on a GPU, and this machine has none: the processor gives other last bits",
        "the precision is fp32 in place of tf32, which needs a GPU",
    ]
    assert engine_here({"name": "inline", "device": "cpu"}) == ({"name": "inline", "device": "cpu"}, [])


@with_gpus(1)
def test_a_run_stays_on_its_kind_of_device(gpus: None) -> None:
    assert engine_here({"name": "inline", "device": "cuda:3"}) == ({"name": "inline", "device": "cuda"}, [])
    table, (said,) = engine_here({"name": "inline", "device": "cpu"})
    assert table["device"] == "cpu"
    assert "--device auto takes a GPU" in said
    assert engine_here({"name": "inline", "device": "cpu"}, "auto")[0]["device"] == "cuda"
    cluster = {"name": "ray", "address": "head:6379", "gpus": 0.5, "threads": 2}
    assert engine_here(cluster) == ({"name": "inline", "threads": 2, "device": "cuda"}, [])
