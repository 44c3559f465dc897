"""A plan of small runs, for tests of what carries it out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.results.rows import LINES, Row, StudyInfo
from fedlens.studies.carry_out import RunOptions
from fedlens.studies.jobs import InProcess, Jobs, sweep
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.progress import StudyProgress
from fedlens.studies.store import StudyStore

WALL_FACTS = ("cpu_seconds", "seconds")


def planned(seed: int, lr: float = 0.1, rounds: int = 4, method: str = "fedavg", **more: Any) -> PlannedRun:
    settings = {
        "name": f"{method}-lr{lr}-seed{seed}",
        "rounds": rounds,
        "seed": seed,
        "model": {"name": "linear"},
        "algorithm": {"name": method},
        "local": {"lr": lr},
        "engine": {"name": "inline", "threads": 1},
        "checkpoint": {"seconds": 0.0},
        "data": {
            "dataset": {"name": "digits"},
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
        },
        **more,
    }
    return PlannedRun(method, {}, {"local.lr": lr}, "final", seed, settings, settings["name"])


FAILING = planned(7, model={"name": "linear", "weights": "nowhere.safetensors"})


@dataclass
class FixedPlan:
    """All runs at once; with `rung`, first all up to that round."""

    runs: Sequence[PlannedRun]
    rung: int | None = None
    asked: list[int] = field(default_factory=list)

    @property
    def number_of_runs(self) -> dict[str, int]:
        return {"tune": 0, "final": len(self.runs)}

    def due(self, lines: Mapping[str, Row]) -> list[DueRun]:
        self.asked.append(len(lines))
        if self.rung is not None:
            first = [DueRun(run, self.rung) for run in self.runs if run.digest not in lines]
            if first:
                return first
        done = ("finished", "failed")
        return [
            DueRun(run)
            for run in self.runs
            if run.digest not in lines or lines[run.digest].status not in done
        ]

    def info(self, lines: Mapping[str, Row]) -> StudyInfo:
        methods = dict.fromkeys(run.method for run in self.runs)
        return StudyInfo(
            name="small",
            title="",
            seeds=sorted({run.seed for run in self.runs}),
            metric=None,
            last=1,
            targets=[],
            baseline=next(iter(methods)),
            methods={name: name for name in methods},
            dimensions={},
            cases=[{}],
            entries=[run.entry for run in self.runs],
        )


class Heard(StudyProgress):
    """Keeps what a study says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ended: list[str] = []
        self.rounds: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        self.rounds.append((run.key, round, rounds))

    def run_ended(self, run: PlannedRun, line: Row) -> None:
        self.ended.append(run.key)


def carried_out(folder: Path, plan: FixedPlan, start: Any = None, progress: Any = None) -> StudyStore:
    """The store of the folder after a sweep, in this process unless `start` says otherwise."""
    store, listener = StudyStore(folder), progress or StudyProgress()

    def in_process(due: Sequence[DueRun]) -> Jobs:
        return InProcess(RunOptions(store.runs), listener)

    with store.lock():
        sweep(plan, store, start or in_process, listener)
    return store


def without_clock(folder: Path, name: str = LINES) -> list[dict[str, Any]]:
    """The lines of results.jsonl in the order of the file, without wall-clock values."""
    lines = [json.loads(text) for text in (folder / name).read_text("utf-8").splitlines()]
    for line in lines:
        line["curve"].pop("elapsed", None)
        for key in WALL_FACTS:
            line["facts"].pop(key, None)
    return lines
