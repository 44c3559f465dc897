from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedlens
from tests.unit.cli import fake_api

ROOT = Path(__file__).parents[3]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "digits.toml"
    path.write_text(fake_api.RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[Any]]:
    """`api("finishes")` puts the experiment that trains nothing in place; returns the list of its calls."""
    monkeypatch.chdir(tmp_path)

    def put(ending: str) -> list[Any]:
        calls: list[Any] = []
        module = fake_api.make_api(ending, calls)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(fedlens, "api", module, raising=False)
        return calls

    return put


def command(arguments: list[str], ending: str | None = None) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of `fedlens ...` in a process of its own."""
    fake = f"from tests.unit.cli.fake_api import install; install({ending!r}); " if ending else ""
    code = f"{fake}from fedlens.cli.main import main; main()"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return [sys.executable, "-W", "error", "-c", code, *arguments], {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def fedlens_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `fedlens ...` as a process, with its two streams apart."""

    def start(*arguments: str, ending: str | None = None) -> subprocess.CompletedProcess[str]:
        argv, env = command(list(arguments), ending)
        return subprocess.run(
            argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return start
