"""Writes a benchmark's results: machine, versions, command, and the raw seconds of every pair."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.benchmark.comparison import ComparisonRow
from fedlens.benchmark.limit import Workload
from fedlens.run.environment import describe_environment
from fedlens.run.rundir import plain

FORMAT = 3


def as_record(
    rows: Sequence[ComparisonRow], workloads: Sequence[Workload], command: Sequence[str]
) -> dict[str, Any]:
    """The contents of the file.

    `environment` is that of a run's `environment.json`. `workloads` has the fields of each workload that has rows, by
    its name. `rows` has the fields of `ComparisonRow`, with `seconds` for each turn, so two rows of one workload are
    pairs.
    """
    environment: Mapping[str, Any] = describe_environment(command, seed=0)
    return {
        "format": FORMAT,
        "environment": {key: value for key, value in environment.items() if key != "seed"},
        "workloads": {
            load.name: {**vars(load), "model": load.model.__name__}
            for load in workloads
            if any(row.workload == load.name for row in rows)
        },
        "rows": [asdict(row) for row in rows],
    }


def writable(file: Path) -> None:
    """Raises `RunDirectoryError` where the file cannot be written; to be called before hours of measuring."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
        if not file.stat().st_size:
            file.unlink()
    except OSError as error:
        raise RunDirectoryError(f"the file cannot be written: {error.strerror}", where=str(file)) from None


def write(record: Mapping[str, Any], file: Path) -> None:
    """Writes the results. Raises `RunDirectoryError` where the file cannot be written."""
    text = json.dumps(plain(record), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"the file cannot be written: {error.strerror}", where=str(file)) from None
