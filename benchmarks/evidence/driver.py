"""Runs the cells of a study that have no line yet, each in a worker process of one thread."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.evidence import store
from benchmarks.evidence.cells import run
from benchmarks.evidence.studies import Study, final_cells, tuning_cells


def carry_out(
    study: Study, folder: Path, processes: int, methods: Sequence[str], say: Callable[[str], None] = print
) -> None:
    """Tunes, then runs the seeds at the values that tuning chose. What is there already is not run again.

    Args:
        methods: run only these; all where it is empty.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for role in ("tuning", "final"):
            there = store.read(folder)
            asked = tuning_cells(study) if role == "tuning" else final_cells(study, there)
            cells = [cell for cell in asked if not methods or cell.method in methods]
            missing = list({cell.digest: cell for cell in cells if cell.digest not in there}.values())
            say(f"{study.name}, {role}: {len(missing)} of {len(cells)} runs are missing")
            for number, line in enumerate(pool.imap_unordered(run, missing), 1):
                store.append(folder, study.file, line)
                say(f"{number}/{len(missing)} {told(line)}")


def told(line: store.Line) -> str:
    """A line, for whoever is watching."""
    end = line.get("failed") or f"{line['curve'][-1][2]:.3f}"
    what = f"{line['role']:5} {line['case']} | {line['method']} | seed {line['seed']}"
    return f"{what}: {end} ({line['cpu_seconds']} s)"
