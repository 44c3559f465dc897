"""`make` on a machine that is not ready says one clear sentence and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    not shutil.which("make") or not shutil.which("bash"), reason="make or bash is missing"
)


def interpreter(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "a house"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def make(house: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-C", str(house), *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_an_old_python_is_named(house: Path, tmp_path: Path, target: str) -> None:
    old = interpreter(tmp_path / "python3.9", "exit 1")
    done = make(house, target, f"PYTHON={old}")
    assert done.returncode != 0
    assert "fedlens needs Python 3.11 or newer" in done.stderr
    assert str(old) in done.stderr
    assert not (house / ".venv").exists()


def test_a_missing_venv_module_is_named(house: Path, tmp_path: Path) -> None:
    bare = interpreter(tmp_path / "python3.11", 'case "$2" in *ensurepip*) exit 1;; esac')
    done = make(house, "demo", f"PYTHON={bare}")
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr
    assert not (house / ".venv").exists()


def test_a_failed_installation_says_why_and_is_tried_again(house: Path, tmp_path: Path) -> None:
    fake = 'if [ "$2" = pip ]; then echo tried >> "$(dirname "$0")/tries"; echo no network >&2; exit 1; fi'
    here = ".venv/bin/python"
    venv = f"mkdir -p .venv/bin; cat > {here} <<'END'\n#!/bin/sh\n{fake}\nEND\nchmod +x {here}"
    python = interpreter(tmp_path / "python3", f'case "$2" in venv) {venv}\n;; esac')
    for _ in range(2):
        done = make(house, "demo", f"PYTHON={python}")
        assert done.returncode != 0
        assert "no network" in done.stderr
    assert (house / ".venv/bin/tries").read_text().count("tried") == 2


def test_without_a_target_it_lists_the_targets() -> None:
    done = make(ROOT)
    assert done.returncode == 0
    for target in ("demo", "test", "check", "docs", "format", "clean", "bench", "nightly"):
        assert f"make {target} " in done.stdout
