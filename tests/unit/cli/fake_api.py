"""An experiment that trains nothing: it writes a run directory as a real one would, and ends as it is told.

`install("finishes")` puts it in the place of fedlens.api, in this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import fedlens
from fedlens.base.errors import RunFailed
from fedlens.pages.run_page import write_report
from fedlens.settings.config_source import read_source
from tests.unit.results.fake_run import line, make_run

ROUNDS = 3
RECIPE = 'name = "digits"\n'


@dataclass
class Result:
    directory: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    model: Any = None


def make_api(ending: str, calls: list[Any]) -> ModuleType:
    """The module; what it is called with is appended to `calls`."""

    class Experiment:
        @classmethod
        def load(cls, recipe_or_file: str, overrides: Sequence[str] = ()) -> Experiment:
            calls.append(("load", recipe_or_file, list(overrides)))
            read_source(recipe_or_file, overrides)
            return cls()

        def run(self, out: Path | None = None, **more: Any) -> Result:
            progress = more.pop("progress")
            calls.append(("run", out, more))
            return _carry_out(ending, out or Path("runs"), progress)

    def resume(directory: Path, **more: Any) -> Result:
        progress = more.pop("progress")
        calls.append(("resume", directory, more))
        return _carry_out(ending, directory, progress)

    api = ModuleType("fedlens.api")
    vars(api).update(Experiment=Experiment, resume=resume, Result=Result)
    return api


def install(ending: str) -> None:
    """Replaces the module in this process, for good."""
    api = make_api(ending, [])
    sys.modules[api.__name__] = api
    vars(fedlens)["api"] = api


def _carry_out(ending: str, root: Path, progress: Any) -> Result:
    if ending == "breaks at once":
        raise ZeroDivisionError("division by zero")
    status = {"fails": "failed", "is interrupted": "interrupted", "waits": "interrupted"}.get(
        ending, "finished"
    )
    error = "the loss is NaN everywhere" if ending == "fails" else None
    rows = [line(at) for at in range(ROUNDS + 1)]
    directory = make_run(root, rounds=ROUNDS, metrics=rows, summary={"status": status, "error": error})
    write_report(directory)
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8")) | {
        "directory": str(directory)
    }
    progress.started(
        {"name": "digits", "rounds": ROUNDS, "clients": 20, "clients_per_round": 5, "algorithm": "fedavg"}
        | {"dataset": "digits", "model": "small-cnn", "parameters": 28938, "engine": "inline"}
        | {"directory": directory}
    )
    for row in rows:
        progress.round_done(row)
    progress.note("the last checkpoint is [damaged]: the one before was taken")
    print("a user's own print")  # noqa: T201
    os.write(1, b"a worker's print\n")
    if ending == "waits":
        print("waiting", file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(60)
    if ending == "is interrupted":
        raise KeyboardInterrupt
    if ending.startswith("breaks"):
        if ending == "breaks":
            (directory / "summary.json").unlink()
        raise ZeroDivisionError("division by zero")
    progress.finished(summary)
    if status == "failed":
        raise RunFailed(str(error), hint="lower local.lr")
    return Result(directory, summary, rows)
