"""The page for users of other frameworks: its settings exist, and its code runs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens import Experiment
from fedlens.cli.main import app
from tests.contract.contract_kit import nightly_but
from tests.unit.data.formats.tables import write_table
from tests.unit.data.pictures import pixels, write

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "coming-from-other-frameworks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
VALUES = {
    "data.partition.clients": 5,
    "data.partition.alpha": 0.5,
    "data.dataset": "digits",
    "select.fraction": 0.5,
    "select.clients_per_round": 2,
    "evaluation.clients": "none",
    "evaluation.every": 2,
    "engine.min_sites": 2,
    "rounds": 2,
    "seed": 1,
    "local.epochs": 2,
    "local.batch_size": 5,
    "local.lr": 0.1,
    "local.optimizer": "adam",
    "algorithm": "fedavg",
    "model": "linear",
}
NEEDS = {"engine.min_sites": ["engine.name=network"], "select.fraction": ["select={}"]}
BROKEN = """
from fedlens.local.rules import ClientRule

def broken():
    return ClientRule(name="broken", grad=lambda gradients, weights, context: 1 / 0)
"""


def test_the_settings_of_the_page_are_there() -> None:
    cells = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([a-z_.]+)`", cell)} - {"dirichlet", "seeds"}
    assert named == set(VALUES)
    for key, value in VALUES.items():
        before = ["data.partition={name='dirichlet', clients=20, alpha=1.0}", *NEEDS.get(key, [])]
        Experiment.load("digits", [*before, f"{key}={value}"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page names, and a count of breakpoints."""
    for k in range(10):
        write(tmp_path / f"cells/images/{k}.png", pixels(k, 32, 32))
        (tmp_path / "cells/labels").mkdir(exist_ok=True)
        (tmp_path / f"cells/labels/{k}.txt").write_text("0 0.5 0.5 0.25 0.5\n")
        write(tmp_path / f"streets/images/{k}.png", pixels(k, 32, 32))
        write(tmp_path / f"streets/masks/{k}.png", pixels(k, 32, 32, 1) % 2)
        write(tmp_path / "photos" / "ab"[k % 2] / f"{k}.png", pixels(k))
    (tmp_path / "cells/classes.txt").write_text("cell\n")
    write_table(tmp_path / "photos-hf/train-00000-of-00001.parquet", [0, 1] * 6)
    write_table(tmp_path / "photos-hf/test-00000-of-00001.parquet", [0, 1] * 2, first=12)
    (tmp_path / "flower.json").write_text(json.dumps({"0": [11, 0, 3], "1": [5]}))
    rule = (
        (DOCS / "examples" / "my_prox.py").read_text().replace("    start =", "    breakpoint()\n    start =")
    )
    (tmp_path / "my_prox.py").write_text(rule)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("quick_workers", "folder")
@pytest.mark.parametrize("networks", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_code_of_the_page_runs(
    networks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedlens.carry_out._report", lambda directory, progress: None)  # as others
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_code.co_name))
    names: dict[str, Any] = {}
    said = []
    for block in BLOCKS:
        assert block == BLOCKS[0] or len(block.strip().splitlines()) <= 5
        if networks or "yolov5n" not in block:
            exec(block, names)
        said.append(capsys.readouterr().out)
    assert set(stops) == {"pull"}
    broken = next(text for block, text in zip(BLOCKS, said, strict=True) if "broken.py" in block)
    assert "ZeroDivisionError" in broken
    assert "round 1" in broken
    assert "broken.py, line 5" in broken
    assert names["result"].summary["status"] == "finished"
    assert {name.partition("/")[0] for name in names["weights"]} == {"model"}


@pytest.mark.usefixtures("folder")
def test_a_run_takes_the_partition_as_json() -> None:
    partition = re.findall(r"`data.partition = ({.+?})`", PAGE)[0]
    changes = ["rounds=1", "evaluation.every=1", "select={}", f"data.partition={partition}"]
    assert Experiment.load("digits", changes).run(report=False).summary["partition"]["clients"] == 2


COMMANDS = re.findall(r"^\$ fedlens (.*)", PAGE, flags=re.MULTILINE)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", nightly_but(COMMANDS[:2], COMMANDS))
def test_the_commands_of_the_page_run(command: str) -> None:
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    if "iid" in command:
        assert re.search(r"^Classes per client +2$", done.output, flags=re.MULTILINE)
