"""The page on language: its example trains, and its numbers are those of the command beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedlens.base.registry import load_file

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "language.md").read_text(encoding="utf-8")


def test_the_example_learns_which_words_are_good(tmp_path: Path) -> None:
    assert '--8<-- "examples/text_dataset.py"' in PAGE
    result = load_file(DOCS / "examples" / "text_dataset.py").experiment().run(tmp_path / "run", report=False)
    assert result.config["model"]["vocabulary"] == 8
    assert result.metrics[-1]["test_accuracy"] == 1.0


def test_the_tables_of_counts_have_the_accuracies_of_the_page() -> None:
    root = Path(os.environ.get("FEDLENS_DATA", "nowhere"))
    if not (root / "shakespeare").is_dir():
        pytest.skip("no real data: point FEDLENS_DATA at a folder with shakespeare/")
    found = load_file(DOCS / "examples" / "character_baselines.py").baselines(root)
    for name, accuracy in found.items():
        assert f"{name}: {accuracy:.4f}\n" in PAGE
