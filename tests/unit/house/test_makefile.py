"""`make` and `.ci/run`: a machine that is not ready is named, and each command that fails fails the target."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    not shutil.which("make") or not shutil.which("bash"), reason="make or bash is missing"
)

# What each target calls, in this order.
COMMANDS = {
    "check": ["ruff format", "ruff check", "mypy", "lint-imports", "mkdocs build --strict"],
    "test": ["python -m pytest"],
    "docs": ["mkdocs build --strict"],
    "nightly": ["python -m pytest", "python -m tests.mutations"],
    ".ci/run": ["make install-dev", "python ../shared/data/unpack.py", "make check", "make test"],
}


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
    return run(house, ["make", *words])


def run(folder: Path, words: list[str], **places: str) -> subprocess.CompletedProcess[str]:
    # The variables of an outer `make test` would lead to the environment that runs this test.
    outer = {"VENV", "ARGS", "PYTHON", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        words, cwd=folder, env={**env, **places}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_an_old_python_is_named(house: Path, tmp_path: Path, target: str) -> None:
    old = interpreter(tmp_path / "python3.9", "exit 1")
    done = make(house, target, f"PYTHON={old}")
    assert done.returncode != 0
    assert "fedlens needs Python 3.11.4 or newer" in done.stderr
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


@pytest.fixture
def clone(house: Path) -> Path:
    """A clone with an installed environment, whose tools only note their calls; call number $BROKEN fails."""
    (house / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", house / ".ci")
    (house / "scratch").mkdir()
    (house / "../shared/data").mkdir(parents=True)
    (house / "../shared/data/unpack.py").touch()
    (house / ".venv/bin").mkdir(parents=True)
    for stamp in (".created", ".installed", ".installed-dev"):
        (house / ".venv" / stamp).touch()
    for name in ("lint-imports", "make", "mkdocs", "mypy", "python", "ruff"):
        script = f'echo "{name} $*" >> calls; [ "$(wc -l < calls)" -ne "$BROKEN" ]'
        interpreter(house / ".venv/bin" / name, script)
    return house


def called(clone: Path, target: str, broken: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How a target ended when one of its calls failed, and the calls up to its end."""
    (clone / "calls").write_text("", encoding="utf-8")
    places = {"BROKEN": str(broken), "TMPDIR": str(clone / "scratch"), "FEDLENS_DATA": str(clone)}
    if target == ".ci/run":
        words, places["PATH"] = ["bash", target], f"{clone}/.venv/bin:{os.environ['PATH']}"
    else:
        words = ["make", target]
    return run(clone, words, **places), (clone / "calls").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("target", COMMANDS)
def test_a_command_that_fails_fails_its_target(clone: Path, target: str) -> None:
    for broken in range(len(COMMANDS[target]) + 1):
        done, calls = called(clone, target, broken)
        assert (done.returncode == 0) == (broken == 0), done.stderr
        expected = COMMANDS[target][: broken or None]
        assert len(calls) == len(expected)
        assert all(call.startswith(command) for call, command in zip(calls, expected, strict=True))
        assert not list((clone / "scratch").iterdir()), "unpacked data stays behind"


def test_check_fails_on_a_link_to_nothing(clone: Path) -> None:
    interpreter(clone / ".venv/bin/mkdocs", f'exec "{sys.executable}" -m mkdocs "$@"')
    validation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["validation"]
    site = {"site_name": "A house", "plugins": [], "validation": validation}
    (clone / "mkdocs.yml").write_text(yaml.safe_dump(site), encoding="utf-8")
    (clone / "docs").mkdir()
    for link in ("#here", "#nowhere", "nowhere.md"):
        (clone / "docs/index.md").write_text(f"# Here\n\n[A link]({link})\n", encoding="utf-8")
        done, _ = called(clone, "check", broken=0)
        assert (done.returncode == 0) == (link == "#here"), done.stderr
        assert ("nowhere" in done.stderr) == ("nowhere" in link)
        assert ("All checks passed." in done.stdout) == (link == "#here")
        assert len((done.stdout + done.stderr).splitlines()) < 10


def test_nightly_without_real_data_fails_before_its_tests(clone: Path) -> None:
    done = run(clone, ["make", "nightly"], FEDLENS_DATA="", BROKEN="0")
    assert done.returncode != 0
    assert "make nightly FEDLENS_DATA=/path" in done.stderr
    assert not (clone / "calls").exists()


def test_a_wrong_folder_of_real_data_skips_no_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    conftest.pytest_configure(request.config)
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(pytest.UsageError, match="nowhere"):
        conftest.pytest_configure(request.config)


def test_a_test_that_proves_nothing_is_an_error(tmp_path: Path) -> None:
    faults = {
        "no_values": "@pytest.mark.parametrize('value', [])\ndef test(value): ...",
        "wrong_marker": "@pytest.mark.nonsense\ndef test(): ...",
        "unexpected_pass": "@pytest.mark.xfail\ndef test(): ...",
        "warning": "def test(): warnings.warn('old')",
    }
    for name, text in faults.items():
        (tmp_path / f"test_{name}.py").write_text(
            f"import warnings\nimport pytest\n{text}\n", encoding="utf-8"
        )
    options = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "--continue-on-collection-errors",
    ]
    done = run(tmp_path, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(tmp_path)])
    assert done.returncode != 0
    assert "2 failed, 2 errors" in done.stdout, done.stdout + done.stderr
    assert all(f"test_{name}.py" in done.stdout for name in faults)
