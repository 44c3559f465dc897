"""Errors for dataset files that are missing or damaged, shared by all readers."""

from __future__ import annotations

from pathlib import Path

from fedlens.core.errors import DataError

DAMAGED = "it is damaged or not the published file: remove it, and fetch it again, say with --download"


def missing(name: str, folder: Path, wanted: str) -> DataError:
    """The error for a dataset that is not on disk: what was looked for, where, and the two ways to get it."""
    return DataError(
        f"'{name}' not found: looked for {wanted}",
        where=str(folder),
        hint="run again with --download to fetch them, or put the files there; "
        "--data-dir or the environment variable FEDLENS_DATA names another folder to look in",
    )
