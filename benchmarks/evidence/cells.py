"""A cell is one run: settings in, one line of results out."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Role = Literal["tune", "final"]
Point = tuple[int, int, float]  # round, batches of the busiest client up to it, accuracy
VALIDATION = 0.1  # share of the training images that tuning is measured on


@dataclass(frozen=True)
class Cell:
    """One run of a study. A tuning cell is measured on held-out training images, a final one on the test images."""

    case: str
    method: str
    role: Role
    settings: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """What tells it from other cells: its settings, and nothing else, so that studies can share cells."""
        text = json.dumps(self.settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.settings["seed"])


def overlaid(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dotted keys on top; what was given stays as it was.

    >>> overlaid({"local": {"lr": 0.1}}, {"local.epochs": 2, "model": "mlp"})
    {'local': {'lr': 0.1, 'epochs': 2}, 'model': 'mlp'}
    """
    made: dict[str, Any] = copy.deepcopy(dict(settings))
    for key, value in overrides.items():
        *path, last = key.split(".")
        table = made
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return made


def run(cell: Cell) -> dict[str, Any]:
    """The line of a cell: who it is, its curve, its cost. A run that diverges has a line that says so."""
    from fedlens import Experiment
    from fedlens.core.errors import RunFailed

    began, failed = time.process_time(), None
    with tempfile.TemporaryDirectory(prefix="fedlens-evidence-") as folder:
        out = Path(folder) / "run"
        try:
            Experiment(**cell.settings).run(out)
        except RunFailed as error:
            failed = str(error).splitlines()[0]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "digest": cell.digest,
        "case": cell.case,
        "method": cell.method,
        "role": cell.role,
        "seed": cell.seed,
        "cpu_seconds": round(time.process_time() - began, 2),
        **({"failed": failed} if failed else {}),
        "curve": curve(lines, "validation_accuracy" if cell.role == "tune" else "test_accuracy"),
    }


def curve(lines: list[dict[str, Any]], metric: str) -> list[Point]:
    """(round, batches so far, value) of the rounds in which `metric` was measured.

    Batches are hsu2020's: those of the client that does most, summed over the rounds.
    """
    points: list[Point] = []
    batches = 0
    for line in lines:
        batches += line["batches_max"] or 0
        if line.get(metric) is not None:
            points.append((line["round"], batches, round(line[metric], 4)))
    return points
