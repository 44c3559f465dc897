"""What the page "Describe your data" says, done."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from tests.contract.contract_kit import nightly_but

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
DATASET = ["dataset.path=scans", "dataset.table=scans.csv", "dataset.client_column=hospital"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospitals")
    before = os.getcwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["make_scans.py", "scans"]
    try:
        runpy.run_path(str(EXAMPLES / "make_scans.py"), run_name="__main__")
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
    return folder


def fedlens(*words: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == exit_code, done.output
    return done.output


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_the_page_is_what_happens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = fedlens("data", "check", "scans", "--format", "csv", *sets("client_column=hospital"))
    assert (
        "training  8x8 pixels, 3 channels (the most frequent size of the files; size=N changes it; channels=1 suits"
        in said
    )
    assert "clients   6: Bonn 360, Celle 287, Aachen 674, Dessau 239, Fulda 114, Emden 123" in said
    assert "no problems found" in said
    small = ["dataset.channels=1"]
    fedlens("partition", "make", "image-folder", "natural", "--out", "hospitals.npz", *sets(*DATASET, *small))
    shown = json.loads(fedlens("partition", "show", "hospitals.npz", "--json"))
    assert (shown["clients"], shown["examples"], round(shown["emd"], 4)) == (6, 1438, 0.3738)
    recipe = str(EXAMPLES / "scans.toml")
    saved = 'data.partition={name="file", path="hospitals.npz"}'
    short = sets("evaluation.every=2")
    fedlens("run", recipe, "--rounds", "1", "--out", "natural", "--quiet", *short)
    fedlens("run", recipe, "--rounds", "1", "--out", "saved", "--quiet", *sets(saved), *short)
    summaries = [json.loads(Path(name, "summary.json").read_text()) for name in ("natural", "saved")]
    assert [summary["partition"]["digest"] for summary in summaries] == [shown["digest"]] * 2
    assert summaries[0]["final"]["test_loss"] == summaries[1]["final"]["test_loss"]


OF_A_FILE = f'{{name="{EXAMPLES}/one_kind_each.py:one_kind_each", most=50}}'
MIXED = '{name="mix", outer="natural", inner={name="dirichlet", clients=3, alpha=0.5}}'


@pytest.mark.parametrize(
    "partition",
    nightly_but(
        {OF_A_FILE, MIXED},
        [
            '{name="iid", clients=6}',
            '{name="quantity", clients=6}',
            '{name="dirichlet", clients=20, alpha=0.3}',
            '{name="feature", clients=6, noise=0.1, blur=1.0}',
            OF_A_FILE,
            MIXED,
        ],
    ),
)
def test_the_other_populations_of_the_page_train(
    folder: Path, partition: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    out = str(tmp_path / "run")
    recipe = str(EXAMPLES / "scans.toml")
    fedlens("run", recipe, "--rounds", "1", "--out", out, "--quiet", *sets(f"data.partition={partition}"))
    metrics = Path(out, "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(metrics[0]), json.loads(metrics[-1])
    assert last["test_loss"] < first["test_loss"]
    assert last["failed"] == 0
