"""Tests that need a GPU: a real one, or the simulated one on which tests/simulated_gpu/test_rows.py runs them."""

import functools
import os
from types import ModuleType

import pytest
import torch

from fedlens.engines import devices
from fedlens.settings import memory_check
from fedlens.studies import jobs

SIMULATED = os.environ.get("SIMGPU") == "1"
# `device_count` asks NVML; `is_available` would start CUDA, and processes that fork from this one could not use it.
NO_GPU = torch.cuda.device_count() == 0
_free_memory_of = functools.cache(devices.free_memory_of)
collect_ignore_glob = ["test_*.py"] if NO_GPU else []


def pytest_report_header() -> str | None:
    """Says why nothing is collected where somebody asks for these tests alone."""
    if NO_GPU:
        return "no GPU: to simulate one, python -m tests.simulated_gpu.launch --devices 2 -m pytest tests/gpu"
    return None


@pytest.fixture(autouse=True)
def same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs ask another process for the free memory, which takes longer than they do: once."""
    for module in (devices, memory_check, jobs):
        monkeypatch.setattr(module, "free_memory_of", lambda device: list(_free_memory_of(device)))


@pytest.fixture
def simgpu() -> ModuleType:
    """The module of the simulator, for tests that count: `with simgpu.counted() as counts: ...`."""
    if not SIMULATED:
        pytest.skip("counts launches, copies and waits, which only the simulator can (tests/simulated_gpu)")
    import simgpu

    return simgpu


@pytest.fixture
def two_gpus() -> None:
    """For tests of several GPUs: cuda:0 and cuda:1 are different ones."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or `python -m tests.simulated_gpu.launch --devices 2 -m pytest`")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is chosen: there is one GPU, however many there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
