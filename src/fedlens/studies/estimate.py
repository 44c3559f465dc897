"""Estimates the cost of a study before it starts: runs, images, hours, disk and memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from fedlens.base.errors import FedlensError
from fedlens.base.format import count, duration, many, size
from fedlens.results.rows import LINES, Row, read_lines
from fedlens.run.session import Session
from fedlens.studies.carry_out import cached_folder
from fedlens.studies.jobs import cores_of, default_jobs, runs_on_gpus
from fedlens.studies.planned import PlannedRun, settings_without_start
from fedlens.studies.run_cost import RunCost, RunCosts
from fedlens.studies.study_plan import StudyPlan
from fedlens.studies.study_settings import StopSettings
from fedlens.studies.tuning import chosen_point, reaching

BASIS = (
    "The time is that of these images at the speed of timed steps, and of evaluations at that of a timed one."
)


@dataclass(frozen=True)
class StudyEstimate:
    """The cost of the remaining runs of a study.

    Attributes:
        runs: number of runs of the study, by role.
        left: number of runs that are not done.
        images: training images of the remaining runs, counting each use.
        hours: wall-clock time with `jobs` runs at once; None if nothing could be measured.
        core_hours: hours of all runs one after the other.
        disk: bytes of the future run directories. `free`: free bytes on the disk.
        memory: bytes of the largest run.
        jobs: runs at once.
        unknown: number of runs whose time could not be measured, because their steps fail.
        pretraining: "runs" and "left", the number of pre-trainings and of those that are neither done nor in the
            cache; "images" and "core_hours" of the latter. The other numbers, but for `disk` and `memory`, leave them
            out.
        sentences: the same in words.
    """

    runs: dict[str, int]
    left: int
    images: int
    hours: float | None
    core_hours: float | None
    disk: int
    free: int
    memory: int
    jobs: int
    unknown: int
    pretraining: dict[str, float | None]
    sentences: list[str]


def estimate(
    plan: StudyPlan,
    folder: Path,
    *,
    jobs: int | None = None,
    data_dir: Path | None = None,
    download: bool = False,
    timed: bool = True,
) -> StudyEstimate:
    """Estimates the cost of the runs of a study that are not in `folder` yet.

    Times a step of each distinct combination of data, model, algorithm and engine, in memory, and the evaluation of a
    few hundred images; images and sizes follow from the partitions. Successive halving counts with the rounds that
    it leaves; the runs after tuning count with the first point of each method. The estimate ignores what parallel
    runs take from each other, such as memory bandwidth.

    Args:
        jobs: runs at once; None for as many as cores and memory allow.
        timed: whether steps are timed. If not, hours are None and the disk space is 0.

    Raises `FedlensError` if the data of the first run cannot be read.

    >>> study = {"base": "digits", "set": {"rounds": 2, "model.name": "linear"}, "seeds": [0, 1]}
    >>> found = estimate(StudyPlan.load(study), Path("nowhere"), jobs=1)
    >>> found.runs, found.left, found.images
    ({'final': 2}, 2, 5440)
    """
    lines = {line.digest: line for line in read_lines(folder / LINES)}
    costs = RunCosts(Session(), data_dir, download, timed)
    numbers: dict[str, int] = {}
    run_costs: list[RunCost] = []
    cores, left = 1, list[PlannedRun]()
    failed: FedlensError | None = None
    due = {one.run.digest for one in plan.due(lines)} if lines else set()
    for run, rounds in _runs(plan, lines):
        numbers[run.role] = numbers.get(run.role, 0) + 1
        if run.digest in lines and run.digest not in due and lines[run.digest].status != "failed":
            continue
        cores = max(cores, cores_of(run))
        left.append(run)
        try:
            run_costs.append(costs.of(settings_without_start(run), rounds))
        except FedlensError as error:  # the study continues without a run that cannot start
            failed = failed or error
            run_costs.append(RunCost(0.0, None, 0, 0))
    if failed is not None and all(cost.memory == 0 for cost in run_costs):
        raise failed
    before = _pretraining(plan, lines, costs)
    memory = max((cost.memory for cost in (*run_costs, *before)), default=0)
    if jobs is None:
        on_gpus = runs_on_gpus(zip(left, (cost.gpu for cost in run_costs), strict=True))
        jobs = default_jobs(cores, memory, len(run_costs), on_gpus)
    at_once = max(1, jobs)
    times = [cost.seconds for cost in run_costs if cost.seconds is not None]
    seconds = sum(times) if times or not run_costs else None
    made: dict[str, Any] = {
        "runs": numbers,
        "left": len(run_costs),
        "images": round(sum(cost.images for cost in run_costs)),
        "hours": None if seconds is None else max([seconds / at_once, *times]) / 3600,
        "core_hours": None if seconds is None else seconds / 3600,
        "disk": sum(cost.disk for cost in (*run_costs, *before)),
        "free": shutil.disk_usage(_existing(folder)).free,
        "memory": memory,
        "jobs": at_once,
        "unknown": len(run_costs) - len(times),
        "pretraining": {
            "runs": len(plan.pretraining),
            "left": len(before),
            "images": sum(cost.images for cost in before),
            "core_hours": None
            if any(cost.seconds is None for cost in before)
            else sum(cost.seconds or 0.0 for cost in before) / 3600,
        },
    }
    return StudyEstimate(**made, sentences=_sentences(made))


def _pretraining(plan: StudyPlan, lines: Mapping[str, Row], costs: RunCosts) -> list[RunCost]:
    """The costs of the pre-trainings that are neither done nor in the cache."""
    found = []
    for run in plan.pretraining:
        done = run.digest in lines and lines[run.digest].status == "finished"
        if done or cached_folder(run).is_dir():
            continue
        try:
            found.append(costs.of(run.settings))
        except FedlensError:  # the study continues without the runs that need it
            found.append(RunCost(0.0, None, 0, 0))
    return found


def _runs(plan: StudyPlan, lines: dict[str, Row]) -> Iterator[tuple[PlannedRun, int | None]]:
    """All runs of a study, each once, with the rounds that they are expected to do; None for all."""
    runs = list(plan.runs)
    for method, case in plan.cells.pairs if plan.trains else ():
        point = chosen_point(plan.cells, method, case, lines) or plan.cells.points(method)[0]
        runs += plan.cells.final_runs(method, case, point)
    once: dict[str, PlannedRun] = {}
    for run in runs:
        once.setdefault(run.digest, run)
    for run in once.values():
        yield run, _expected(plan, run) if run.role == "tune" else None


def _expected(plan: StudyPlan, run: PlannedRun) -> int | None:
    """The mean number of rounds of the tuning runs that a run competes with; None for all."""
    stop: StopSettings | None = plan.source.settings.stop
    if stop is None or stop.halving is None or stop.first is None:
        return None
    points = len(plan.cells.points(plan.cells.method(run.method)))
    return mean_rounds(points, int(run.settings["rounds"]), stop.first, stop.halving)


def mean_rounds(points: int, rounds: int, first: int, keep: int) -> int:
    """The rounds of a point in successive halving, the mean over the points.

    >>> mean_rounds(9, rounds=450, first=50, keep=3)  # 9 for 50, 3 for another 100; the best of them is chosen
    84
    >>> mean_rounds(9, rounds=40, first=50, keep=3)
    40
    """
    total, before = 0, 0
    for rung, number in reaching(points, rounds, first, keep).items():
        total += number * (rung - before)
        before = rung
    return ceil(total / points) if total else rounds


def _existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    path = folder.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


def _sentences(made: dict[str, Any]) -> list[str]:
    total, left, jobs = sum(made["runs"].values()), made["left"], made["jobs"]
    runs = runs_sentence(made["runs"])
    if left < total:
        runs += f"; {total - left:,} of them {'is' if total - left == 1 else 'are'} done"
    sentences = [f"{runs}."]
    if not left:
        return sentences
    images = f"{'They train' if left > 1 else 'It trains'} on {count(made['images'])} images"
    if made["hours"] is None:
        sentences.append(f"{images}; the time could not be measured: no step of the study could be timed.")
    else:
        clock, alone = duration(3600 * made["hours"]), duration(3600 * made["core_hours"])
        at_once = (
            f"with {jobs} runs at once, {alone} one after the other" if jobs > 1 else "one after the other"
        )
        sentences.append(f"{images}, in about {clock} {at_once}.")
        sentences.append(BASIS)
        if made["unknown"]:
            sentences.append(
                f"{many(made['unknown'], 'run')} could not be measured and are not in this time."
            )
    sentences += _pretraining_sentences(made["pretraining"])
    sentences.append(f"The run directories take about {size(made['disk'])}; {size(made['free'])} are free.")
    if made["disk"] > made["free"]:
        sentences[-1] += " Free some space, or name a folder on another disk with --out."
    sentences.append(f"A run takes up to about {size(made['memory'])} of memory.")
    return sentences


def _pretraining_sentences(made: Mapping[str, Any]) -> list[str]:
    if not made["runs"]:
        return []
    known = made["runs"] - made["left"]
    ready = f"{many(known, 'pre-training')} {'is' if known == 1 else 'are'} done or in the cache"
    if not made["left"]:
        return [f"{ready}."]
    hours = made["core_hours"]
    clock = "" if hours is None else f", in about {duration(3600 * hours)} one after the other"
    words = f"Before them, {many(made['left'], 'pre-training')} on {count(made['images'])} images{clock}"
    return [f"{words}; {ready}." if known else f"{words}."]


def runs_sentence(number: Mapping[str, int]) -> str:
    """Returns the number of runs by role, in words.

    >>> runs_sentence({"final": 6}), runs_sentence({"tune": 12, "final": 1})
    ('6 runs', '12 tuning runs, then 1 final run')
    """
    final = number.get("final", 0)
    if not number.get("tune"):
        return many(final, "run")
    return f"{many(number['tune'], 'tuning run')}, then {many(final, 'final run')}"


__all__ = ["StudyEstimate", "estimate", "mean_rounds", "runs_sentence"]
