"""A benchmark as a file: the machine, the versions, the command, and every pair's raw seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlens.benchmark.limit import Workload
from fedlens.benchmark.rows import Row
from fedlens.core.errors import RunDirectoryError
from fedlens.experiment.environment import describe_environment

FORMAT = 1


def as_record(rows: Sequence[Row], workloads: Sequence[Workload], command: Sequence[str]) -> dict[str, Any]:
    """What the file says.

    `environment` is what a run's `environment.json` says; `workloads` has every field of each by its name; `rows` has
    the fields of `Row`, `seconds` a number for each turn: those of two rows of one workload are pairs.
    """
    environment: Mapping[str, Any] = describe_environment(command, seed=0)
    return {
        "format": FORMAT,
        "environment": {key: value for key, value in environment.items() if key != "seed"},
        "workloads": {load.name: {**vars(load), "model": load.model.__name__} for load in workloads},
        "rows": [asdict(row) for row in rows],
    }


def writable(file: Path) -> None:
    """Raises `RunDirectoryError` where a file cannot be written there; told before hours are measured."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
        if not file.stat().st_size:
            file.unlink()
    except OSError as error:
        raise RunDirectoryError(f"the file cannot be written: {error.strerror}", where=str(file)) from None


def write(record: Mapping[str, Any], file: Path) -> None:
    """Writes it. Raises `RunDirectoryError` where that cannot be done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"the file cannot be written: {error.strerror}", where=str(file)) from None
