"""`fedlens federation dossier` writes two files, and says which of its options is missing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.unit.cli.commands import ran, refused
from tests.unit.identity.federation_kit import federation_in

HOSPITALS = Path(__file__).parents[3] / "docs/examples/hospitals.toml"


def test_it_writes_the_dossier_of_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    federation_in(tmp_path)
    said = ran(
        "federation", "dossier", "hospitals", "--experiment", HOSPITALS, "--set", "rounds=7", "--clients", "4",
        "--until", "2099-01-31", "--agreement", HOSPITALS,
    )  # fmt: skip
    assert said == "wrote: dossier/dossier.md\nwrote: dossier/dossier.html\n"
    text = Path("dossier/dossier.md").read_text()
    assert "for at most 7 rounds" in text
    assert "4 clients of 8 made-up images" in text
    assert "2099-01-31" in text
    assert "count the images of a site that has withdrawn" in text
    assert hashlib.sha256(HOSPITALS.read_bytes()).hexdigest() in text


def test_an_experiment_or_a_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    federation_in(tmp_path)
    assert "name one of the two" in refused("federation", "dossier", "hospitals")
    both = ("--experiment", HOSPITALS, "--run", ".")
    assert "name one of the two" in refused("federation", "dossier", "hospitals", *both)
    for option in (("--clients", "2"), ("--until", "2099-01-31"), ("--agreement", HOSPITALS)):
        assert "leave out --set, --clients" in refused(
            "federation", "dossier", "hospitals", "--run", ".", *option
        )
    over = refused("federation", "dossier", "hospitals", "--experiment", HOSPITALS, "--until", "2020-01-31")
    assert "is no last day of a run" in over
