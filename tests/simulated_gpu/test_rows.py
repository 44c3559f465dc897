"""Runs tests/gpu, which needs a GPU, and the simulator's own tests in processes with two simulated GPUs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.simulated_gpu import launch

ROOT = Path(__file__).parents[2]
ROWS = "tests/gpu"
SIMULATOR = "tests/simulated_gpu/test_simulator.py"
CI = "not nightly and not paper"
TIERS = [
    pytest.param(CI, id="ci"),
    pytest.param("nightly and not paper", id="nightly", marks=pytest.mark.nightly),
]


@pytest.fixture
def simulated() -> dict[str, str]:
    """The environment of a process with two simulated GPUs; the test is skipped where none can be simulated."""
    if reason := launch.missing():
        pytest.skip(reason)
    made = launch.environment(SIMGPU_DEVICES="2")
    # The process is no worker of this one's pytest; all else passes through: data, coverage, profiles.
    return {
        name: value for name, value in made.items() if not name.startswith(("PYTEST_XDIST", "PYTEST_CURRENT"))
    }


@pytest.mark.parametrize("tier", TIERS)
def test_all_that_needs_a_gpu_passes_on_a_simulated_one(tier: str, simulated: dict[str, str]) -> None:
    options = [
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "--color=no",
        "--verbosity=0",
        "--durations=10",
        "-m",
        tier,
    ]
    command = [sys.executable, "-m", "pytest", *options, ROWS, SIMULATOR]
    done = subprocess.run(command, cwd=ROOT, env=simulated, capture_output=True, text=True)
    sys.stdout.write(done.stdout)  # for `pytest -s`
    if done.returncode or "passed" not in done.stdout:
        pytest.fail(f"pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}", pytrace=False)
    if tier == CI:
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / ROWS).glob("test_*.py")}
        passed = set(re.findall(r"^(\S+\.py) \S*\.", done.stdout, re.MULTILINE))
        assert files | {SIMULATOR} == passed, "a file of tests/gpu has no test that passes in the ci tier"


def test_no_file_has_a_name_that_pytest_passes_over() -> None:
    names = {path.relative_to(ROOT / ROWS).as_posix() for path in (ROOT / ROWS).rglob("*.py")}
    assert {
        name for name in names if not re.fullmatch(r"test_\w+\.py|\w+_kit\.py|conftest\.py", name)
    } == set()


@pytest.mark.parametrize(("gpus", "ignored"), [(0, ["test_*.py"]), (1, [])])
def test_they_are_collected_where_a_gpu_is(
    gpus: int, ignored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    conftest = runpy.run_path(str(ROOT / ROWS / "conftest.py"))
    assert conftest["collect_ignore_glob"] == ignored
    assert (conftest["pytest_report_header"]() is None) == (gpus > 0)
