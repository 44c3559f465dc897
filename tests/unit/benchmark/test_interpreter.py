"""Interpreters are looked for where people install them, and tried before they are used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedlens.benchmark.interpreter import find_interpreter


def script(file: Path, status: int) -> Path:
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\nexit {status}\n")
    file.chmod(0o755)
    return file


@pytest.mark.skipif(sys.platform == "win32", reason="writes shell scripts in place of interpreters")
def test_the_first_version_that_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", "")
    launcher = script(tmp_path / "shims" / "python2.1", 127)  # of pyenv, where this version is not chosen
    monkeypatch.setenv("PATH", str(launcher.parent))
    assert find_interpreter(["2.1", "2.2"]) is None
    by_conda = script(tmp_path / "miniforge3" / "envs" / "old" / "bin" / "python2.2", 0)
    assert find_interpreter(["2.1", "2.2"]) == by_conda
    by_uv = script(tmp_path / ".local/share/uv/python" / "cpython-2.2.3" / "bin" / "python2.2", 0)
    assert find_interpreter(["2.1", "2.2"]) == by_uv
    by_pyenv = script(tmp_path / "pyenv" / "versions" / "2.1.3" / "bin" / "python2.1", 0)
    assert find_interpreter(["2.1", "2.2"]) == by_pyenv
    assert find_interpreter(["2.2", "2.1"]) == by_uv


def test_the_running_interpreter_comes_first() -> None:
    assert find_interpreter([f"{sys.version_info.major}.{sys.version_info.minor}"]) == Path(sys.executable)
