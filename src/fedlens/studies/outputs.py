"""Writes what a person looks at after a study: tables, figures and the page."""

from __future__ import annotations

from pathlib import Path


def write_outputs(folder: Path) -> list[Path]:
    """Writes the tables, figures and page of the study in `folder`, from study.json and results.jsonl alone."""
    return []
