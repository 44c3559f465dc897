"""What is installed is what is here."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedlens
from fedlens.settings.config_source import recipes

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LEAST = PROJECT["requires-python"].removeprefix(">=")  # the oldest Python


def test_no_file_has_the_marks_of_a_merge() -> None:
    folders = [ROOT / name for name in ("src", "tests", "tools", "docs", "benchmarks")]
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
    files = [path for path in (source / "fedlens").rglob("*") if path.is_file()]
    wanted = {path.relative_to(source).as_posix() for path in files if path.parent.name != "__pycache__"}
    assert {"fedlens/py.typed", "fedlens/recipes/digits.toml"} <= wanted
    assert wanted <= set(wheel.namelist())


def test_the_wheel_says_who_it_is(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith("METADATA")]
    metadata = wheel.read(name).decode()
    assert f"\nVersion: {fedlens.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert f"\nRequires-Python: >={LEAST}\n" in metadata
    assert "\nRequires-Dist: torch>=2.10\n" in metadata


@pytest.mark.nightly
def test_the_wheel_runs_in_an_environment_of_its_own(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Nothing is downloaded: a .pth file lends the environment the libraries of this one, but not its fedlens.

    Python reads no .pth file of a folder that a .pth file names, and an editable installation is such a file.
    """
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }

    def run(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    venv.create(tmp_path / "env", with_pip=True)
    python, command = tmp_path / "env/bin/python", tmp_path / "env/bin/fedlens"
    run(str(python), "-m", "pip", "install", "--no-index", "--no-deps", str(wheel.filename))
    places = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(places.strip()) / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    imported = run(str(python), "-c", "import fedlens; print(fedlens.__file__)")
    assert Path(imported.strip()).is_relative_to(tmp_path / "env")
    assert run(str(command), "--version").split()[:2] == ["fedlens", fedlens.__version__]
    run(str(command), "run", "digits", "--set", "rounds=2", "--out", "run")
    assert "plotly" in (tmp_path / "run/report.html").read_text("utf-8")
    assert (tmp_path / "run/model.safetensors").exists()
    listed = run(str(command), "list", "recipes")
    assert [name for name in recipes() if name not in listed] == []


def test_everything_names_the_same_oldest_and_newest_python() -> None:
    minor = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    oldest, newest = minor[0], minor[-1]
    assert LEAST.startswith(f"{oldest}.")
    for page in ("README.md", "docs/index.md", "Makefile"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.findall(r"Python (3[.\d]*) or newer", text) == [LEAST], page
    assert f"< ({LEAST.replace('.', ', ')})" in (ROOT / "Makefile").read_text(encoding="utf-8")
    (job,) = _yaml(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python-version"] == [oldest, newest]
    assert job["steps"][-1] == {"run": "bash .ci/run"}


def test_the_files_for_the_forge_can_be_read() -> None:
    citation = _yaml("CITATION.cff")
    assert (citation["title"], citation["version"]) == (PROJECT["name"], fedlens.__version__)
    assert citation["license"] == PROJECT["license"]
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = _yaml(str(path.relative_to(ROOT)))
        assert {"name", "description", "body"} <= form.keys()
    (repository,) = _yaml(".pre-commit-config.yaml")["repos"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in repository["hooks"]:
        assert f"$(BIN)/{hook['name']}" in makefile, "a commit and make format run the same"


def _yaml(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return content


def test_the_command_is_there() -> None:
    module, function = PROJECT["scripts"]["fedlens"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fedlens", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "fedlens")


def test_no_file_is_longer_than_two_subjects() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("src", "tools", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert not long


SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS if path.stem != "__init__"])
def test_the_scripts_of_benchmarks_can_be_imported(script: str) -> None:
    """They are run by hand, some of them on machines that there are none of here."""
    module = importlib.import_module(f"benchmarks.{script}")
    assert hasattr(module, "main") == ("__main__" in Path(str(module.__file__)).read_text("utf-8"))
