"""Editors and type checkers know the settings: the types are fresh, right settings pass and wrong ones are found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools.settings_types import FILE, rendered

SOURCE = Path(__file__).parents[3] / "src" / "fedlens"
USE = """
from typing import Any
from fedlens.api import Experiment
from fedlens.studies.study import Study

def mine(parts: object, *, mu: float = 0.1) -> object: ...

data: Any = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
more: dict[str, Any] = {}
Experiment(rounds=2, model="linear", local={"lr": 0.1, "batch_size": "all", "betas": (0.9, 0.99)}, data=data)
Experiment(rounds=2, algorithm={"name": mine, "mu": 1}, client=["proximal", mine], model=mine, engine="inline")
Experiment(data={"dataset": "mine.py:digits", "augment": ["flip", {"name": "crop"}], "parties": None}, seed=1)
Experiment(evaluation={"every": 2, "size": [8, 8], "neighbours": "cifar10"}, **more)
Study(base="digits", seeds=[0, 1], grid={"local.lr": [0.1]}, methods={"a": {"set": {"algorithm": "fedprox"}}})
Study(base={"rounds": 2}, target=0.9, random={"number": 3, "local.lr": {"low": 0.1, "high": 1}}, tune={"share": 0.2})
"""
WRONG = {
    'Experiment(local={"lrr": 0.1})': '"lrr"',
    'Experiment(local={"lr": "fast"})': '"lr" has type "float"',
    "Experiment(round=2)": '"round"',
    'Experiment(rounds="two")': '"int"',
    'Experiment(data={"normalize": "imagnet"})': '"normalize"',
    "Experiment(engine=3)": '"engine"',
    "Study(seed=[0])": '"seed"',
    'Study(tune={"shares": 0.1})': '"tune"',
    'Study(base={"local": {"lrr": 0.1}})': '"base"',
}


def test_the_types_are_those_of_the_settings() -> None:
    assert FILE.read_text("utf-8") == rendered(), "run `python -m tools.settings_types`"


def test_a_type_checker_passes_right_settings_and_finds_wrong_ones(tmp_path: Path) -> None:
    """Only the files with these types are checked: all others are skipped, or it would take a minute."""
    code = USE + "\n".join(WRONG) + "\n"
    (tmp_path / "use.py").write_text(code, "utf-8")
    checked = [SOURCE / "api.py", SOURCE / "studies" / "study.py", FILE, tmp_path / "use.py"]
    options = ["--follow-imports=skip", "--config-file=", "--no-error-summary", "--no-pretty"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), *map(str, checked)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MYPYPATH": str(SOURCE.parent), "PATH": ""},
    )
    found: dict[int, str] = {}
    for line, text in re.findall(r"^use\.py:(\d+): error: (.*)$", done.stdout, re.M):
        found[int(line)] = found.get(int(line), "") + text
    first = code.count("\n") - len(WRONG) + 1
    assert set(found) == set(range(first, first + len(WRONG))), done.stdout + done.stderr
    for line, (wrong, named) in enumerate(WRONG.items(), first):
        assert named in found[line], (wrong, found[line])
