"""What the tutorials show is done, in order, in rounds and clients few enough for a test."""

from __future__ import annotations

import glob
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens import Experiment
from fedlens.base.registry import load_file
from fedlens.cli.main import app

ROOT = Path(__file__).parents[3]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
IN_CI = {"first-run-in-python", "own-algorithm", "read-a-result"}
SMALLER = {"cifar10": "digits", "size=500": "size=40"}
SHORTER = {
    "rounds=30": "rounds=1",
    "rounds=60": "rounds=2",
    "[0, 1, 2, 3, 4]": "[0]",
    "[100, 101, 102]": "[100]",
    "digits.images,": "digits.images[:400],",
    "digits.target,": "digits.target[:400],",
}
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def steps(page: Path) -> list[tuple[str, str]]:
    """The commands and the Python code of a page, in order; not the files that it shows."""
    found = []
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            found.append((kind, block))
        else:
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [(kind, line[2:]) for line in lines if line.startswith("$ ")]
    return found


def shorten(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for old, new in SHORTER.items():
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def do(command: str) -> None:
    program, *words = shlex.split(command)
    words = [name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])]
    if program == "cp":
        shutil.copy(*words)
    elif program == "python":
        shorten(Path(words[0]))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    else:
        assert program == "fedlens"
        words = [SMALLER.get(word, word) for word in words if word != "--download"]
        if words[0] == "run":
            words += ["--rounds", "1", "--set", "evaluation.every=1", "--no-report"]
        if words[0] == "cost":
            words += ["--seeds", "1", "--set", "rounds=1", "--no-report"]
        if words[0] == "sweep":
            shorten(Path(words[1]))
            words += ["--set", "rounds=1", "--jobs", "1"]
        if words[:2] == ["partition", "plot"]:
            words += ["--format", "svg"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{command}\n{done.output}"


@pytest.mark.parametrize(
    "page",
    [each if each.stem in IN_CI else pytest.param(each, marks=pytest.mark.nightly) for each in TUTORIALS],
    ids=lambda page: page.stem,
)
def test_what_a_tutorial_shows_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    shutil.copytree(ROOT / "docs" / "examples", "docs/examples")
    found, names = steps(page), dict[str, Any]()
    assert found
    for kind, text in found:
        if kind == "console":
            do(text)
        else:
            exec(text, names)  # the cells of one notebook
    for module in ("first_run", "my_prox"):
        sys.modules.pop(module, None)


def test_the_first_run_is_the_same_in_toml_and_in_python() -> None:
    script = (ROOT / "docs/examples/first_run.py").read_text("utf-8")
    assert len(script.splitlines()) <= 20
    assert (
        load_file(ROOT / "docs/examples/first_run.py").experiment.config == Experiment.load("digits").config
    )
