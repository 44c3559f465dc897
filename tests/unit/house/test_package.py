"""What is installed is what is here."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedlens

ROOT = Path(__file__).parents[3]


def test_no_file_has_the_marks_of_a_merge() -> None:
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks")]
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in folder.rglob("*"))]
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    texts = {file: file.read_text("utf-8") for file in files if file.suffix in {".py", ".md", ".toml", ".j2"}}
    assert [file for file, text in texts.items() if any(f"\n{mark}" in text for mark in marks)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    pytest.importorskip("hatchling", reason="hatchling builds the package: pip install 'fedlens[dev]'")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return zipfile.ZipFile(made)


def test_the_wheel_has_every_source_file_recipe_and_mark(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "fedlens").rglob("*")
        if path.suffix in {".py", ".toml", ".typed", ".html", ".css", ".js"}
    }
    assert {"fedlens/py.typed", "fedlens/recipes/digits.toml"} <= wanted
    assert wanted <= set(wheel.namelist())


def test_the_wheel_has_the_scripts_that_drive_the_peers(wheel: zipfile.ZipFile) -> None:
    scripts = {path.name for path in (ROOT / "benchmarks" / "peers").iterdir() if path.is_file()}
    assert {"peers.toml", "install.py", "turns.py"} <= scripts
    there = {Path(name).name for name in wheel.namelist() if name.startswith("fedlens/benchmark/peers/")}
    assert there == scripts


def test_the_wheel_says_who_it_is(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith("METADATA")]
    metadata = wheel.read(name).decode()
    assert f"\nVersion: {fedlens.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nRequires-Dist: torch>=2.10\n" in metadata


def test_the_command_is_there() -> None:
    import importlib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, function = scripts["fedlens"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fedlens", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "fedlens")


def test_no_file_is_longer_than_two_subjects() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("src", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert not long


SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS if path.stem != "__init__"])
def test_the_scripts_of_benchmarks_can_be_imported(script: str) -> None:
    """They are run by hand, some of them on machines that there are none of here."""
    assert hasattr(importlib.import_module(f"benchmarks.{script}"), "main")
